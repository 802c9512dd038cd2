"""Sending a folder to a Hub, and comparing what arrived.

create, upload      by upload_folder of the client, which sends no large file that the Hub has already
revision            afterwards: every file lies there as it is
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING

from scale_surgery.checkpoint.hashes import hash_file
from scale_surgery.errors import HubError
from scale_surgery.hub.client import WAIT_SECONDS, Remote, hub_errors
from scale_surgery.hub.repository import git_hash
from scale_surgery.progress import Progress, Track

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo, HfApi
    from huggingface_hub.hf_api import RepoSibling


def upload(
    api: HfApi,
    folder: Path,
    remote: Remote,
    *,
    private: bool,
    create_pr: bool,
    revision: str | None,
    commit_message: str,
    removed: Iterable[str] = (),
) -> CommitInfo:
    """Make the repository and the branch where they are not there, and send a folder.

    Args:
        api: The client.
        folder: What the repository is to hold.
        remote: What is there.
        private: Whether a new repository is private.
        create_pr: Open a pull request.
        revision: The branch, or None for the main one.
        commit_message: First line of the commit.
        removed: Names of files that leave the repository in the same commit.

    Returns:
        The commit.

    Raises:
        HubError: If the Hub refuses, or the connection breaks. What has arrived stays there.
    """
    repo, again = remote.repo, "The same command again continues: what has arrived is not sent a second time."
    with hub_errors(repo, "not pushed", again):
        if not remote.exists:
            api.create_repo(repo, private=private, exist_ok=True)
        if revision is not None and not remote.has_revision:
            api.create_branch(repo, branch=revision, exist_ok=True)
        with _unsaid():
            return api.upload_folder(
                repo_id=repo,
                folder_path=folder,
                commit_message=commit_message,
                revision=revision,
                create_pr=create_pr,
                delete_patterns=[escape(name) for name in removed] or None,
            )


@contextmanager
def _unsaid() -> Iterator[None]:
    """Silence what the client says and a result says too: warnings on the card, and that nothing was to be sent."""
    logger = logging.getLogger("huggingface_hub.hf_api")

    def is_news(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("No files have been modified")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.addFilter(is_news)
        try:
            yield
        finally:
            logger.removeFilter(is_news)


def check_arrived(api: HfApi, repo: str, commit: str, folder: Path, names: Sequence[str], track: Track) -> bool:
    """Compare what lies in a repository with what was sent, file by file: size and hash.

    Args:
        api: The client.
        repo: Hub id.
        commit: The commit that was made.
        folder: What was sent.
        names: Its files.
        track: Makes progress bars.

    Returns:
        Whether the repository is private.

    Raises:
        HubError: If a file is not there as it was sent; each is named.
    """
    with hub_errors(repo, "pushed, but cannot be looked at"):
        info = api.model_info(repo, revision=commit, files_metadata=True, timeout=WAIT_SECONDS)
    found = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    problems = []
    with track("arrived", sum((folder / name).stat().st_size for name in names)) as advance:
        for name in names:
            if problem := _difference(folder / name, found.get(name), advance):
                problems.append(f"{repo}: {name} {problem}. Is it in a .gitignore? Push again.")
    if problems:
        raise HubError.from_problems(problems)
    return bool(info.private)


def _difference(file: Path, there: RepoSibling | None, advance: Progress) -> str | None:
    """How what lies in a repository differs from a file, or None."""
    size, found = file.stat().st_size, None if there is None else there.size
    if there is None or found != size:
        return f"has {'no' if found is None else found} bytes there, expected {size}"
    name = there.blob_id if there.lfs is None else there.lfs.sha256
    expected = git_hash(file) if there.lfs is None else hash_file(file, advance)
    return None if name in (None, expected) else f"has other content there, hash {name}, expected {expected}"
