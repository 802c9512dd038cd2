"""Settings of a push, with their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Push:
    """Settings of a push.

    Attributes:
        private: Make a new repository private (the default) or public. An existing repository keeps its visibility. If
            this flag differs from it, the push is rejected.
        create_pr: Open a pull request instead of writing to the main branch.
        revision: Branch to write to. It is created if it does not exist. Default: the main branch.
        commit_message: First line of the commit message. Default: Push ... with scale-surgery.
        card: File to push as README.md. Default: the folder's own card, or a generated one.
        write_card: Generate a new card, even if a hand-written one exists.
        license: Licence in the generated card, by its Hub name, such as apache-2.0. Default: the base's.
        replace: If the repository holds another model, remove its model files that this folder lacks.
        check: Check bytes and structure of the folder first.
    """

    private: bool | None = None
    create_pr: bool = False
    revision: str | None = None
    commit_message: str | None = None
    card: Path | None = None
    write_card: bool = False
    license: str | None = None
    replace: bool = False
    check: bool = True
