"""Push a folder to the Hub: checked first, with a model card, only new files, in a single commit.

folder --verify--> contents --links--> repository --card, token, access checked--> Hub --every file compared--> done
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from glob import escape
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from scale_surgery.checkpoint.file_stat import check_unchanged
from scale_surgery.checkpoint.forms import Form
from scale_surgery.checkpoint.names import CARD_FILE, CONFIG_FILE, MANIFEST_FILE, STOCK_FILE
from scale_surgery.checkpoint.reading import read_bytes
from scale_surgery.errors import HubError, Problem
from scale_surgery.hub.card import make_card
from scale_surgery.hub.check import Checked, check_contents
from scale_surgery.hub.client import check_repo_id, hub_errors, look_at
from scale_surgery.hub.repository import (
    Card,
    CardOrigin,
    Contents,
    RepositoryFile,
    assemble,
    is_part_of_a_model,
    is_same_base,
    is_written_card,
    read_card,
    read_contents,
)
from scale_surgery.hub.settings import Push
from scale_surgery.progress import Track, no_track

if TYPE_CHECKING:
    from huggingface_hub import HfApi, ModelInfo


MESSAGES: dict[Form, str] = {
    "expanded": "Push an expanded model with scale-surgery",
    "extract": "Push an expansion with scale-surgery",
    "stock": "Push a widened model with scale-surgery",
}


@dataclass(frozen=True)
class Pushed:
    """The result of `push`, or its forecast in a dry run.

    Attributes:
        repo: Hub id.
        form: "expanded", "extract" or "stock".
        files: Files of the repository after the push.
        left_out: Files of the folder that are not pushed.
        removed: Model files in the repository that the folder does not have; they are removed.
        card: Text of the model card, or None if the repository's card stays.
        card_origin: "written" from facts, the user's "own", or the repository's, "kept".
        is_private: True if the repository is private.
        is_checked: True if bytes and structure were checked.
        notes: Notes for the user.
        commit: The commit, or the latest one if the Hub already had everything; None if nothing was sent.
        url: Address of the commit, or of the pull request; None if nothing was sent.
        obstacle: With `dry_run`, the reason why the Hub would refuse the push; None if there is none.
        is_unchanged: True if the Hub already had everything, so that no commit was made.
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
        """Size of all files in bytes."""
        return sum(file.bytes for file in self.files)


def push(
    folder: str | Path,
    repo: str,
    how: Push | None = None,
    *,
    dry_run: bool = False,
    token: str | None = None,
    track: Track = no_track,
) -> Pushed:
    """Push an expanded folder, a stock export or an extract to the Hub; the folder is only read.

    Args:
        folder: Folder made by `expand`, `train`, `route_export`, `merge`, `extract` or `compose`.
        repo: Hub id, user/name or organisation/name.
        how: Settings of the push; by default to the main branch, with a card from facts, after a check.
        dry_run: Change nothing on the Hub.
        token: Token of the Hub; by default the one that huggingface_hub finds.
        track: Makes progress bars.

    Returns:
        The pushed files, with the commit.

    Raises:
        CheckpointError: If the folder is none of these, or does not pass its check.
        HubError: If the id is invalid, there is no token or no write access, the card is refused, the repository holds
            another model's files, or the Hub cannot be reached. Files that arrived before need not be sent again.
    """
    from huggingface_hub import HfApi, get_token

    how, path = how or Push(), Path(folder)
    check_repo_id(repo)
    contents, info, obstacles = read_contents(path), None, list[str]()
    # the token is passed explicitly, since the client may be configured not to send the token that it finds
    api = HfApi(token=token or get_token(), library_name="scale-surgery", library_version=version("scale-surgery"))

    @contextmanager
    def asking() -> Iterator[None]:
        """Collect the Hub's refusals in a dry run; otherwise raise them."""
        try:
            yield
        except HubError as error:
            if not dry_run:
                raise
            obstacles.append(" ".join(error.lines))

    with asking():
        info = look_at(api, repo, how)
    checked = check_contents(contents, track) if how.check else Checked()
    with tempfile.TemporaryDirectory() as place:
        target = Path(place)
        card = _choose_card(contents, repo, how, checked, api, info)
        plan = _assemble(contents, target, repo, how, info, card)
        if not obstacles:
            with asking():
                _refuse_mixture(api, plan, how, info, contents)
                _check_card(card)
        plan = replace(plan, obstacle=next(iter(obstacles), None), notes=(*card.notes, *checked.warnings))
        # what is sent is what was checked
        check_unchanged(contents.stamps)
        if dry_run:
            return plan
        sent = _send(api, target, plan, how, info)
        check_unchanged(contents.stamps)
        return sent


def _choose_card(
    contents: Contents,
    repo: str,
    how: Push,
    checked: Checked,
    api: HfApi,
    info: ModelInfo | None,
) -> Card:
    """Choose a card; a card written by a person is never replaced unless requested."""
    base_text = None if contents.base_card is None else read_card(contents.path / contents.base_card)
    if how.card is not None:
        return Card(_read_own(how.card), "own")
    if not how.write_card:
        if contents.has_own_card:
            _refuse_licence(how, contents.path)
            return Card(_read_own(contents.path / CARD_FILE), "own")
        if CARD_FILE in _names(info):
            there = _read_remote(api, repo, info, CARD_FILE)
            if not is_written_card(there) and there != base_text:
                _refuse_licence(how, repo)
                note = (
                    f"{CARD_FILE} in {repo} was written by somebody and stays, though it may describe an earlier push; "
                    "--write-card replaces it."
                )
                return Card(None, "kept", (note,))
    base_file = contents.free_name if contents.base_card == CARD_FILE else contents.base_card
    return make_card(contents, repo, base_text, base_file, checked.certificate, how.license)


def _refuse_licence(how: Push, place: object) -> None:
    if how.license is not None:
        raise HubError(Problem("license-beside-card", "--license", license=how.license, place=place))


def _read_own(file: Path) -> str:
    try:
        return read_bytes(file).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HubError(Problem("card-unreadable", file, error=error)) from error


def _names(info: ModelInfo | None) -> list[str]:
    """Return the names of the files of a repository."""
    return [] if info is None else sorted(sibling.rfilename for sibling in info.siblings or ())


def _read_remote(api: HfApi, repo: str, info: ModelInfo | None, file: str) -> str:
    with hub_errors("repository-file-unreadable", f"{repo}: {file}"):
        return read_card(Path(api.hf_hub_download(repo, file, revision=None if info is None else info.sha)))


def _assemble(contents: Contents, target: Path, repo: str, how: Push, info: ModelInfo | None, card: Card) -> Pushed:
    """Make the repository as a folder of links, with its card, and describe it."""
    files = assemble(contents, target, card)
    names = {file.name for file in files}
    return Pushed(
        repo=repo,
        form=contents.form,
        files=files,
        left_out=contents.left_out,
        removed=tuple(name for name in _names(info) if name not in names and is_part_of_a_model(name)),
        card=card.text,
        card_origin=card.origin,
        is_private=how.private is not False if info is None else bool(info.private),
        is_checked=how.check,
        notes=card.notes,
    )


def _refuse_mixture(api: HfApi, plan: Pushed, how: Push, info: ModelInfo | None, contents: Contents) -> None:
    """Refuse a repository with another model, or with further model files: the result would be a mixture."""
    if how.replace:
        return
    there = _names(info)
    records = [name for name in (MANIFEST_FILE, STOCK_FILE) if name in there]
    if CONFIG_FILE in there and not records:
        raise HubError(Problem("repository-not-ours", plan.repo))
    if records and not is_same_base(contents.record, _read_remote(api, plan.repo, info, records[0])):
        raise HubError(Problem("repository-other-base", plan.repo, file=records[0]))
    if plan.removed:
        raise HubError(Problem("repository-more-files", plan.repo, files=plan.removed))


def _check_card(card: Card) -> None:
    """Refuse metadata that cannot be parsed, or that the Hub does not accept."""
    from huggingface_hub import ModelCard

    if card.text is None:
        return
    try:
        parsed = ModelCard(card.text)
    except Exception as error:
        # the parser's error classes differ by release
        raise HubError(Problem("card-metadata-unreadable", CARD_FILE, error=" ".join(str(error).split()))) from error
    with hub_errors("card-metadata-refused", CARD_FILE):
        parsed.validate()


def _send(api: HfApi, target: Path, plan: Pushed, how: Push, info: ModelInfo | None) -> Pushed:
    """Send a folder; the client skips files that the Hub has, and commits last."""
    repo = plan.repo
    with hub_errors("push-broken-off", repo):
        if info is None:
            api.create_repo(repo, private=plan.is_private, exist_ok=True)
        if how.revision is not None and not api.revision_exists(repo, how.revision):
            api.create_branch(repo, branch=how.revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=target,
            commit_message=how.commit_message or MESSAGES[plan.form],
            revision=how.revision,
            create_pr=how.create_pr,
            # a card that somebody wrote meanwhile is not replaced
            parent_commit=None if info is None else info.sha,
            delete_patterns=[escape(name) for name in plan.removed] or None,
        )
    with hub_errors("push-not-compared", repo):
        compared = api.verify_repo_checksums(repo, revision=commit.oid, local_dir=target)
    problems = [Problem("pushed-file-missing", f"{repo}: {name}") for name in compared.extra_paths]
    problems += [Problem("pushed-file-differs", f"{repo}: {each['path']}") for each in compared.mismatches]
    if problems:
        raise HubError(*problems)
    is_unchanged = info is not None and commit.oid == info.sha
    return replace(plan, is_unchanged=is_unchanged, commit=commit.oid, url=commit.pr_url or commit.commit_url)
