"""Which model card a push takes: the user's own, the one in the repository, or one from facts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from scale_surgery.errors import HubError
from scale_surgery.hub import Remote, read_text
from scale_surgery.model_card import current_certificate, is_written_card, make_card
from scale_surgery.repository import CARD_FILE, Contents, read_card

if TYPE_CHECKING:
    from huggingface_hub import HfApi

    from scale_surgery.verify import Verification

CardOrigin = Literal["written", "own", "kept"]


@dataclass(frozen=True)
class ChosenCard:
    """A card, or None where that in the repository stays; where it comes from; and what the user should know."""

    text: str | None
    origin: CardOrigin
    notes: tuple[str, ...] = ()


def choose_card(
    contents: Contents,
    base_text: str | None,
    given: Path | None,
    checked: Verification | None,
    api: HfApi,
    remote: Remote,
    *,
    is_written: bool,
) -> ChosenCard:
    """Choose a card; one that somebody wrote is never replaced unasked.

    Args:
        contents: What is pushed.
        base_text: The base's README.md, or None.
        given: A file that the user named, or None.
        checked: What the check of the folder found, or None.
        api: The client of the Hub.
        remote: What is on the Hub.
        is_written: Whether the user asked for a card from facts.

    Returns:
        The card.

    Raises:
        HubError: If the given file or the card in the repository cannot be read.
    """
    if given is not None:
        return ChosenCard(_read_given(given), "own")
    if contents.own_card is not None and not is_written:
        return ChosenCard(read_card(contents.path / contents.own_card), "own")
    if CARD_FILE in remote.files and not is_written:
        there = read_text(api, remote, CARD_FILE)
        if not is_written_card(there) and there != base_text:
            note = (
                f"{CARD_FILE} in {remote.repo} was written by somebody and stays, though it may describe an earlier "
                "push; --write-card replaces it."
            )
            return ChosenCard(None, "kept", (note,))
    base_file = contents.free_name if contents.base_card == CARD_FILE else contents.base_card
    certificate = current_certificate(contents.record.get("verification"), checked)
    card = make_card(contents, remote.repo, base_text, base_file, certificate)
    return ChosenCard(card.text, "written", card.notes)


def _read_given(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HubError(f"{file}: cannot be read as a model card ({error}). Give a text file in UTF-8.") from error
