"""Push a folder to the Hub: checked first, with a model card, nothing that the Hub has already, whole in one go.

folder --verify--> contents --links--> repository --card, token, access checked--> Hub --every file compared--> done
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from scale_surgery.checkpoint.forms import Form
from scale_surgery.checkpoint.names import CONFIG_FILE, MANIFEST_FILE, STOCK_FILE
from scale_surgery.errors import CheckpointError, HubError, name_some
from scale_surgery.hub.card import CardOrigin, ChosenCard, WishedCard, choose_card, metadata_problem
from scale_surgery.hub.check import check_contents
from scale_surgery.hub.client import Remote, check_repo_id, look_at, make_api, read_text, validate_card
from scale_surgery.hub.repository import (
    CARD_FILE,
    Contents,
    RepositoryFile,
    assemble,
    describe_files,
    is_part_of_a_model,
    is_same_base,
    read_card,
    read_contents,
)
from scale_surgery.hub.upload import check_arrived, upload
from scale_surgery.progress import Track, no_track

if TYPE_CHECKING:
    from huggingface_hub import HfApi


@dataclass(frozen=True)
class Push:
    """How to push.

    Attributes:
        private: Make a new repository private, the default, or public. One that exists stays what it is, and is refused
            where it is not what was asked for.
        create_pr: Open a pull request instead of writing to the main branch.
        revision: Branch to write to; it is created if it does not exist. Default: the main branch.
        commit_message: First line of the commit message. Default: Push ... with scale-surgery.
        card: Push this file as README.md. Default: the folder's own card, or one written from facts.
        write_card: Write a new card from facts, even over one that somebody wrote.
        license: Licence that the written card names, as the Hub calls it, such as apache-2.0. Default: the base's.
        extract_only: Push the expansion alone, without the base's tensors, as the command extract takes it.
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
    extract_only: bool = False
    replace: bool = False
    check: bool = True

    @property
    def makes_private(self) -> bool:
        """Whether a repository that does not exist yet becomes private."""
        return self.private is not False


@dataclass(frozen=True)
class Pushed:
    """What `push` did, or would do.

    Attributes:
        repo: Hub id.
        form: "expanded", "extract" or "stock".
        files: What the repository gets.
        left_out: Files of the folder that stay behind.
        removed: Model files in the repository that the folder does not have; they leave it.
        card: Text of the model card, or None where that in the repository stays.
        card_origin: "written" from facts, the user's "own", or the one in the repository, "kept".
        is_private: Whether the repository is private.
        is_checked: Whether bytes and structure were checked.
        notes: What the user should know.
        commit: The commit, which is the last one where the Hub had all; None where nothing was sent.
        url: Address of the commit, or of the pull request; None likewise.
        obstacle: With `dry_run`, what keeps the Hub from taking it; None where nothing does.
        is_unchanged: Whether the Hub had all of it already, so that no commit was made.
    """

    repo: str
    form: Form
    files: tuple[RepositoryFile, ...]
    left_out: tuple[str, ...]
    removed: tuple[str, ...]
    card: str | None
    card_origin: CardOrigin
    is_private: bool
    is_checked: bool
    notes: tuple[str, ...]
    commit: str | None = None
    url: str | None = None
    obstacle: str | None = None
    is_unchanged: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self.files)


def say_nothing(found: Pushed) -> None:
    """Announce nothing."""


def push(
    folder: str | Path,
    repo: str,
    how: Push | None = None,
    *,
    dry_run: bool = False,
    token: str | None = None,
    endpoint: str | None = None,
    announce: Callable[[Pushed], None] = say_nothing,
    track: Track = no_track,
) -> Pushed:
    """Push an expanded folder, a stock export or an extract to the Hub; the folder is only read.

    Args:
        folder: What `expand`, `train`, `route_export`, `merge`, `extract` or `compose` made.
        repo: Hub id, user/name or organisation/name.
        how: How to push; by default to the main branch, with a card from facts, after a check.
        dry_run: Send nothing that changes anything.
        token: Token of the Hub; by default the one that huggingface_hub finds.
        endpoint: Address of the Hub; by default that of huggingface_hub.
        announce: Called with what will be sent, before it is.
        track: Makes progress bars.

    Returns:
        What was sent.

    Raises:
        CheckpointError: If the folder is none of these, or does not pass its check.
        HubError: If the id is none, there is no token or no write access, the card is refused, the repository holds
            another model's files, or the Hub cannot be reached. What has arrived by then need not be sent again.
    """
    how, path = how or Push(), Path(folder)
    check_repo_id(repo)
    contents, api = read_contents(path), make_api(token, endpoint)
    base_text = None if contents.base_card is None else read_card(path / contents.base_card)
    remote, obstacle = _look(api, repo, how)
    _stop_at(obstacle, dry_run=dry_run)
    checked = check_contents(contents, track) if how.check else None
    with tempfile.TemporaryDirectory() as place:
        contents = _extract(contents, Path(place), track) if how.extract_only else contents
        target = Path(place) / "repository"
        target.mkdir()
        wished = WishedCard(how.card, how.write_card, how.license)
        chosen = choose_card(contents, base_text, wished, checked, api, remote)
        plan = _assemble(contents, target, how, remote, chosen)
        warned = () if checked is None else checked.warnings
        obstacle = obstacle or _refusal(api, plan, how, remote, contents) or _card_problem(plan)
        plan = replace(plan, obstacle=obstacle, notes=(*plan.notes, *warned))
        plan = plan if plan.obstacle else _validate(api, plan)
        _stop_at(plan.obstacle, dry_run=dry_run)
        announce(plan)
        return plan if dry_run else _send(api, target, remote, plan, how, track)


def _look(api: HfApi, repo: str, how: Push) -> tuple[Remote, str | None]:
    """What is on the Hub, and what keeps it from taking a push."""
    try:
        found = look_at(api, repo, how.revision, create_pr=how.create_pr)
    except HubError as error:
        return Remote(repo, False, how.makes_private, False, None, ()), str(error)
    if not found.exists or how.private in (None, found.is_private):
        return found, None
    words = ("private", "public") if found.is_private else ("public", "private")
    return (
        found,
        f"{repo}: is {words[0]}, expected a {words[1]} repository. Leave out --{words[1]}, or take another id.",
    )


def _stop_at(obstacle: str | None, *, dry_run: bool) -> None:
    if obstacle is not None and not dry_run:
        raise HubError(obstacle)


def _extract(contents: Contents, place: Path, track: Track) -> Contents:
    """The expansion of a folder alone, in a temporary folder, without a copy where the file system allows that."""
    from scale_surgery.surgery.extract import extract

    names = () if contents.manifest is None else tuple(contents.manifest.expansions)
    if len(names) > 1:
        raise CheckpointError(
            f"{contents.path}: holds the expansions {', '.join(names)}, --extract-only needs a folder of one. Take one "
            f"out and push that: scale-surgery extract {contents.path} --name {names[0]} -o {names[0]}."
        )
    if contents.form != "expanded":
        raise CheckpointError(f"{contents.path}: is no expanded folder, --extract-only needs one. Leave it out.")
    try:
        done = extract(contents.path, place / "extract", base_weights="link", track=track)
    except CheckpointError:
        # a temporary folder may lie on another file system; what else is wrong is found once more
        done = extract(contents.path, place / "extract", overwrite=True, track=track)
    return replace(read_contents(done.path), left_out=done.left_out)


def _assemble(contents: Contents, target: Path, how: Push, remote: Remote, chosen: ChosenCard) -> Pushed:
    """Make the repository as a folder of links, with its card, and describe it."""
    assemble(contents, target, with_own_card=chosen.origin == "own" and how.card is None)
    if chosen.text is not None and not (target / CARD_FILE).exists():
        (target / CARD_FILE).write_bytes(chosen.text.encode("utf-8"))
    files = describe_files(contents, target)
    names = {file.name for file in files}
    return Pushed(
        repo=remote.repo,
        form=contents.form,
        files=files,
        left_out=contents.left_out,
        removed=tuple(name for name in remote.files if name not in names and is_part_of_a_model(name)),
        card=chosen.text,
        card_origin=chosen.origin,
        is_private=remote.is_private if remote.exists else how.makes_private,
        is_checked=how.check,
        notes=chosen.notes,
    )


def _refusal(api: HfApi, plan: Pushed, how: Push, remote: Remote, contents: Contents) -> str | None:
    """Why a repository that holds another model, or files of one, does not become this one."""
    if how.replace:
        return None
    advice = (
        "Push to another repository or --revision, or give --replace, which makes this model of it; its history keeps "
        "the other."
    )
    records = [name for name in (MANIFEST_FILE, STOCK_FILE) if name in remote.files]
    if CONFIG_FILE in remote.files and not records:
        return f"{plan.repo}: holds a model that scale-surgery did not make. {advice}"
    if records and not is_same_base(contents.record, read_text(api, remote, records[0])):
        return f"{plan.repo}: holds a model on another base, by its {records[0]}. {advice}"
    if not plan.removed:
        return None
    return (
        f"{plan.repo}: holds model files that the folder does not have ({name_some(plan.removed)}); beside them it "
        "would be another model. Push to another repository or --revision, or give --replace: they leave in the "
        "same commit, and its history keeps them."
    )


def _card_problem(plan: Pushed) -> str | None:
    problem = None if plan.card is None else metadata_problem(plan.card)
    return problem and f"{CARD_FILE}: its metadata cannot be read ({problem}). Mend the card, or give --write-card."


def _validate(api: HfApi, plan: Pushed) -> Pushed:
    """Let the Hub check the card."""
    if plan.card is None:
        return plan
    try:
        warned = validate_card(api, plan.repo, plan.card)
    except HubError as error:
        return replace(plan, obstacle=str(error))
    return replace(plan, notes=(*plan.notes, *(f"the Hub says of the card: {text}" for text in warned)))


def _send(api: HfApi, target: Path, remote: Remote, plan: Pushed, how: Push, track: Track) -> Pushed:
    names = {
        "expanded": "an expanded model",
        "extract": "an expansion",
        "stock": "a widened model",
    }
    commit = upload(
        api,
        target,
        remote,
        private=how.makes_private,
        create_pr=how.create_pr,
        revision=how.revision,
        commit_message=how.commit_message or f"Push {names[plan.form]} with scale-surgery",
        removed=plan.removed,
    )
    is_private = check_arrived(api, plan.repo, commit.oid, target, [file.name for file in plan.files], track)
    is_unchanged = remote.has_revision and commit.oid == remote.commit
    url = commit.pr_url or commit.commit_url
    return replace(plan, is_private=is_private, is_unchanged=is_unchanged, commit=commit.oid, url=url)
