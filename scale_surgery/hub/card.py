"""The model card of a pushed folder, from what surgery.json or merge.json records, and from nothing else.

Metadata name the base only by a Hub id, and take its licence from the base's own card. The last line holds the hash of
the card, by which a card that nobody has edited is known again: only such a one is ever replaced unasked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from scale_surgery.checkpoint.licence import read_licence
from scale_surgery.checkpoint.reading import read_bytes
from scale_surgery.errors import CheckpointError, HubError
from scale_surgery.hub.card_sections import CardFacts, body
from scale_surgery.hub.client import Remote, read_text
from scale_surgery.hub.repository import CARD_FILE, _marked, is_written_card, read_card

if TYPE_CHECKING:
    from huggingface_hub import HfApi

    from scale_surgery.evidence.verification import Verification
    from scale_surgery.hub.repository import Contents

CardOrigin = Literal["written", "own", "kept"]


HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Card:
    """A model card.

    Attributes:
        text: The whole of README.md.
        notes: What could not be said in it, and why.
    """

    text: str
    notes: tuple[str, ...] = ()


def make_card(
    contents: Contents,
    repo: str,
    base_text: str | None,
    base_file: str | None,
    certificate: Mapping[str, Any] | None,
    license: str | None = None,
) -> Card:
    """Write the card of a folder.

    Args:
        contents: The folder.
        repo: Hub id that it is to have.
        base_text: The base's README.md, or None.
        base_file: Name that it has in the repository, or None.
        certificate: What verification found, as in surgery.json; None where nothing is known.
        license: Licence to name in place of the base's, or None.

    Returns:
        The card.

    Raises:
        CheckpointError: If the folder's record lacks what a card says.
    """
    try:
        facts = card_facts(contents, repo, base_file, certificate)
        text = body(facts)
        known = read_licence(base_text) or contents.licence
        licence = {"license": license} if license else known
        metadata = _metadata(facts, licence)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"{contents.path / contents.record_file}: is incomplete ({error}). Restore it from where you got it."
        ) from error
    notes = []
    if facts.base_id is None:
        notes.append("base_model is left out of the card: the base is a local folder, no Hub id is known.")
    if not licence:
        notes.append("license is left out of the card: no README.md of the base here names one. Give --license.")
    if license and known.get("license") not in (None, license):
        notes.append(f"license is {license}, as --license says; the base's card names {known['license']}.")
    running = "is code, or names some, which trust_remote_code=True runs. Read it before you publish it."
    notes += [f"{name}: {running}" for name in facts.code]
    return Card(_marked(f"---\n{_yaml(metadata)}\n---\n\n{text}"), tuple(notes))


def card_facts(
    contents: Contents, repo: str, base_file: str | None, certificate: Mapping[str, Any] | None
) -> CardFacts:
    """Take the facts of a card from the records of a folder."""
    record, manifest = contents.record, contents.manifest
    name, revision = record.get("base_name"), record.get("base_revision")
    is_on_hub = isinstance(name, str) and revision is not None and HUB_ID.fullmatch(name) is not None
    routing, plan = (None, None) if manifest is None else (manifest.routing, manifest.first_plan)
    return CardFacts(
        repo=repo,
        form=contents.form,
        base_id=name if is_on_hub else None,
        base_revision=revision if is_on_hub else None,
        base_fingerprint=str(record.get("base_fingerprint")) if plan is None else plan.base_fingerprint,
        record=record,
        expansions={} if manifest is None else manifest.expansions,
        routing=routing,
        is_fused=record.get("fused") is not None,
        drift=(record.get("fused") or record).get("drift"),
        certificate=certificate,
        code=contents.code if contents.form == "stock" or (manifest is not None and not manifest.code) else (),
        base_file=base_file,
        has_curves="training/curves.png" in contents.files,
        tool=record.get("tool", {}),
    )


def current_certificate(recorded: Mapping[str, Any] | None, checked: Verification | None) -> Mapping[str, Any] | None:
    """The certificate that is still about these tensors.

    Args:
        recorded: The one in surgery.json, or None.
        checked: What was found just now, or None where nothing was checked.

    Returns:
        The recorded one, unless tensors, router or code have changed since; then what was found just now. None where
        nothing was checked.
    """
    if checked is None:
        return None
    is_current = recorded is not None and recorded.get("fingerprint") == checked.fingerprint
    return recorded if is_current else checked.to_json()


def metadata_problem(text: str) -> str | None:
    """What is wrong with the metadata of a card, before the Hub is asked; None where nothing is."""
    from huggingface_hub import ModelCard

    try:
        ModelCard(text)
    except Exception as error:
        # the parser's own classes of errors differ by release
        return " ".join(str(error).split())
    return None


def _metadata(facts: CardFacts, licence: Mapping[str, Any]) -> dict[str, Any]:
    variants = dict.fromkeys(str(request.variant) for request in facts.requests)
    tags = ["scale-surgery", "continual-learning", "model-expansion", *variants]
    tags += ["composed"] * facts.are_several + ["routed"] * (facts.routing is not None)
    found: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation", **licence}
    if facts.base_id is not None:
        # an extract is added to the base; anything else holds it and has learned more
        relation = "adapter" if facts.form == "extract" else "finetune"
        found |= {"base_model": facts.base_id, "base_model_relation": relation}
    return {**found, "tags": tags}


def _yaml(metadata: Mapping[str, Any]) -> str:
    from huggingface_hub import ModelCardData

    return ModelCardData(**metadata).to_yaml()


@dataclass(frozen=True)
class ChosenCard:
    """A card, or None where that in the repository stays; where it comes from; and what the user should know."""

    text: str | None
    origin: CardOrigin
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class WishedCard:
    """What the user asked for: a file of their own, a card from facts over one that is there, a licence for that."""

    file: Path | None = None
    is_written: bool = False
    license: str | None = None


def choose_card(
    contents: Contents,
    base_text: str | None,
    wished: WishedCard,
    checked: Verification | None,
    api: HfApi,
    remote: Remote,
) -> ChosenCard:
    """Choose a card; one that somebody wrote is never replaced unasked.

    Args:
        contents: What is pushed.
        base_text: The base's README.md, or None.
        wished: What the user asked for.
        checked: What the check of the folder found, or None.
        api: The client of the Hub.
        remote: What is on the Hub.

    Returns:
        The card.

    Raises:
        HubError: If the given file or the card in the repository cannot be read, or a licence is given for a card that
            somebody wrote.
    """
    if wished.file is not None:
        return ChosenCard(_read_given(wished.file), "own")
    if contents.own_card is not None and not wished.is_written:
        _refuse_licence(wished, contents.path / contents.own_card)
        return ChosenCard(read_card(contents.path / contents.own_card), "own")
    if CARD_FILE in remote.files and not wished.is_written:
        there = read_text(api, remote, CARD_FILE)
        if not is_written_card(there) and there != base_text:
            _refuse_licence(wished, f"{CARD_FILE} in {remote.repo}")
            note = (
                f"{CARD_FILE} in {remote.repo} was written by somebody and stays, though it may describe an earlier "
                "push; --write-card replaces it."
            )
            return ChosenCard(None, "kept", (note,))
    base_file = contents.free_name if contents.base_card == CARD_FILE else contents.base_card
    certificate = current_certificate(contents.record.get("verification"), checked)
    card = make_card(contents, remote.repo, base_text, base_file, certificate, wished.license)
    return ChosenCard(card.text, "written", card.notes)


def _refuse_licence(wished: WishedCard, card: object) -> None:
    if wished.license is not None:
        raise HubError(
            f"--license {wished.license}: {card} was written by somebody and stays as it is. Name the licence there, "
            "or give --write-card, which writes a new card from facts."
        )


def _read_given(file: Path) -> str:
    try:
        return read_bytes(file).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HubError(f"{file}: cannot be read as a model card ({error}). Give a text file in UTF-8.") from error
