"""List the files of an untrusted folder, and decide which of them belong to a model.

A symbolic link may point to any file that the user can read, and a device or pipe may never end.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from scale_surgery.checkpoint.files import UNFINISHED, is_there
from scale_surgery.checkpoint.foreign import GGUF_SUFFIX, load_gguf
from scale_surgery.checkpoint.names import (
    CONFIG_FILE,
    INDEX_FILE,
    MANIFEST_FILE,
    SAMPLES_FILE,
    TRAINING_FOLDER,
    as_unicode,
    is_inside,
    is_unicode,
)
from scale_surgery.checkpoint.reading import other_kind
from scale_surgery.errors import CheckpointError, Problem

# these files and shards may be links to any place: large shards are often kept on another disk
FOLLOWED = (CONFIG_FILE, INDEX_FILE, MANIFEST_FILE)
# files of a model besides its weights, by the ends of their names: settings, tokenizers, templates and code
PARTS = (".json", ".model", ".tiktoken", ".jinja", ".py", "vocab.txt", "merges.txt", "additional_chat_templates")
# version control and download bookkeeping, not part of a checkpoint
IGNORED_FOLDERS = (".git", ".cache", "__pycache__")


@contextmanager
def reached(path: Path) -> Iterator[None]:
    """Reject a path that cannot be accessed: a name is too long, or a parent folder is not readable."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(Problem("path-unreachable", path, error=error.strerror or error)) from error


def check_folder(path: Path) -> None:
    """Check that a model folder exists."""
    with reached(path):
        exists, is_folder = is_there(path), path.is_dir()
    if not exists:
        raise CheckpointError(Problem("folder-missing", path))
    if not is_folder and path.suffix.lower() == GGUF_SUFFIX:
        raise CheckpointError(Problem("folder-is-gguf", path, load=load_gguf(path.parent, path.name)))
    if not is_folder:
        raise CheckpointError(Problem("folder-is-file", path))


def list_files(path: Path) -> list[str]:
    """List the files of a folder, sorted, without version control, download bookkeeping and unfinished files."""
    check_folder(path)
    kept = [file.as_posix() for file in _entries(path) if _is_listed(path / file)]
    if problems := [problem for name in kept if (problem := unfit(path, name))]:
        raise CheckpointError(*problems)
    if not kept:
        raise CheckpointError(Problem("folder-empty", path))
    return kept


def _is_listed(file: Path) -> bool:
    with reached(file):
        return is_there(file) and not file.is_dir()


def _entries(path: Path) -> list[Path]:
    """Return the files and folders at any depth, relative and sorted, without IGNORED_FOLDERS."""
    entries: list[Path] = []
    for folder, folders, files in os.walk(path, onerror=_refuse_closed):
        # unfinished folders of another process may vanish at any moment
        folders[:] = [name for name in folders if name not in IGNORED_FOLDERS and not name.startswith(UNFINISHED)]
        entries += [Path(folder, name).relative_to(path) for name in (*folders, *files) if name not in IGNORED_FOLDERS]
    return sorted(entries)


def _refuse_closed(error: OSError) -> None:
    # a folder that vanished belonged to another process
    if not isinstance(error, FileNotFoundError):
        raise CheckpointError(Problem("folder-unlistable", error.filename, error=error.strerror)) from error


def unfit(path: Path, name: str) -> Problem | None:
    """Return the problem of an entry that cannot be a file of a model, or None."""
    if not is_unicode(name):
        return Problem("name-no-unicode", path, name=os.fsencode(name))
    if not is_inside(name):
        return Problem("name-with-backslash", path / name)
    kind = other_kind((path / name).stat().st_mode)
    return Problem("file-not-regular", path / name, kind=kind) if kind else None


def leads_out(path: Path, name: str) -> bool:
    """Return True if a file is a link out of the folder.

    Links from the Hub's cache to its blobs do not count.
    """
    inside = PurePosixPath(name)
    steps = (inside, *inside.parents[:-1])
    # without links in its path, a file is inside the folder
    if ".." not in inside.parts and not inside.is_absolute() and not any((path / step).is_symlink() for step in steps):
        return False
    root, target = path.resolve(), (path / name).resolve()
    places = [root, *([root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [])]
    return not any(target.is_relative_to(place) for place in places)


def links_that_are_no_files(path: Path) -> tuple[str, ...]:
    """Return the names of links to folders, which are not followed, and of broken links."""
    links = (link for link in _entries(path) if (path / link).is_symlink() and not (path / link).is_file())
    return tuple(as_unicode(link.as_posix()) for link in links)


def is_left_link(path: Path, name: str) -> bool:
    """Return True if a file is a link out of the folder and not part of a model. Such a file is never copied."""
    return name not in FOLLOWED and not name.endswith(".safetensors") and leads_out(path, name)


def linked_parts(path: Path) -> list[str]:
    """Return links that are not followed but have the name of a part of a model, such as its tokenizer."""
    linked = [*(name for name in list_files(path) if is_left_link(path, name)), *links_that_are_no_files(path)]
    return [name for name in linked if "/" not in name and name.endswith(PARTS)]


def is_private(path: Path, name: str) -> bool:
    """Return True if a file is not published with a model: what stays behind, and samples, which begin with prompts."""
    return stays_behind(path, name) or name == f"{TRAINING_FOLDER}/{SAMPLES_FILE}"


def stays_behind(path: Path, name: str) -> bool:
    """Return True if a file is not copied with a model, unless a record names it."""
    parts = PurePosixPath(name).parts
    # hidden files may contain keys and settings; states and logs of trainers contain host names
    is_hidden = any(part.startswith(".") for part in parts) and name != ".gitattributes"
    is_state = any(re.fullmatch(r"checkpoint-\d+|runs", part) for part in parts[:-1]) or ".tfevents." in name
    return is_hidden or is_state or is_left_link(path, name)
