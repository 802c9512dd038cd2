"""Settings of a push, with their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Push:
    """Settings of a push.

    Attributes:
        private: Make a new repository private, the default, or public. One that exists stays what it is, and is refused
            where it is not what was asked for.
        create_pr: Open a pull request instead of writing to the main branch.
        revision: Branch to write to; it is created if it does not exist. Default: the main branch.
        commit_message: First line of the commit message. Default: Push ... with scale-surgery.
        card: Push this file as README.md. Default: the folder's own card, or one written from facts.
        write_card: Write a new card from facts, even over one that somebody wrote.
        license: Licence that the written card names, as the Hub calls it, such as apache-2.0. Default: the base's.
        replace: If the repository holds another model, remove its model files that this folder does not have.
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
