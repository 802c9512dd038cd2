"""Atomic writing of folders: under a temporary name, and renamed when complete.

Inputs are never opened for writing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.file_stat import Stamps, check_unchanged
from scale_surgery.checkpoint.files import (
    is_there,
    nearest_folder,
    remove_unfinished,
    remove_unfinished_of,
    sync,
    write_text,
)
from scale_surgery.checkpoint.folder import read_json
from scale_surgery.checkpoint.listing import reached
from scale_surgery.checkpoint.locks import link_problems, locked, names_beside, refuse_links, replace_folder, settle
from scale_surgery.checkpoint.names import CONFIG_FILE
from scale_surgery.errors import CheckpointError, Problem, SurgeryError

# problems of a machine, and not of the input: the next run may go on with what is finished
OF_A_MACHINE = {
    *("file-unreadable", "tensor-unreadable", "temporary-unwritten"),
    *("model-not-loaded", "model-not-run", "out-of-memory"),
}


def check_target(target: Path, sources: list[Path], *, overwrite: bool) -> None:
    """Check before any work that a folder can be written without touching anything else."""
    with reached(target):
        problems = _target_problems(target, sources, overwrite=overwrite)
    if problems:
        raise CheckpointError(*problems)


def _target_problems(target: Path, sources: list[Path], *, overwrite: bool) -> list[Problem]:
    partial = _partial(target)
    problems = [
        Problem("output-touches-input", path, input=source)
        for source in sources
        for path in (target, partial)
        if touches(path, source)
    ]
    if not problems:
        problems = _occupied(target, partial, overwrite=overwrite)
    parent = nearest_folder(target.resolve().parent)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        problems.append(Problem("output-closed", target, parent=parent))
    return problems


def check_output_files(files: Sequence[Path | None], inputs: Sequence[str | Path]) -> None:
    """Check before any work that files can be written and are not inputs."""
    problems = output_file_problems(files, inputs)
    if problems:
        raise CheckpointError(*problems)


def output_file_problems(files: Sequence[Path | None], inputs: Sequence[str | Path]) -> list[Problem]:
    """Return the problems of output files; see `check_output_files`."""
    places = {file: file.resolve() for file in files if file is not None}
    problems = [
        Problem("output-file-is-input", file, input=source)
        for file, place in places.items()
        for source in dict.fromkeys(map(str, inputs))
        if lies_in(place, Path(source).resolve())
    ]
    for file, place in places.items():
        with reached(file):
            if is_there(place) and place.is_dir():
                problems.append(Problem("output-file-is-folder", file))
            parent = nearest_folder(place.parent)
            if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
                problems.append(Problem("output-file-closed", file, parent=parent))
    counts = Counter(file.resolve() for file in files if file is not None)
    twice = [file for file, place in places.items() if counts[place] > 1]
    problems += [Problem("output-file-twice", file) for file in twice[:1]]
    return problems


def lies_in(path: Path, folder: Path) -> bool:
    """Return True if a path is a folder or file, or lies in it, by whatever name it is called."""
    # of the spellings of a name in a file system that ignores case, or behind a bind mount, resolve() makes no one name
    return path.is_relative_to(folder) or (
        folder.exists() and any(place.samefile(folder) for place in (path, *path.parents) if place.exists())
    )


def touches(path: Path, source: Path) -> bool:
    """Return True if writing to a path would modify an input."""
    written, read = path.resolve(), source.resolve()
    if lies_in(written, read) or lies_in(read, written):
        return True
    # input files may be links, as in the Hub's cache
    return written.is_dir() and any(file.resolve().is_relative_to(written) for file in source.rglob("*"))


def _occupied(target: Path, partial: Path, *, overwrite: bool) -> list[Problem]:
    if target.name in ("", ".."):
        return [Problem("output-unnamed", target, name=Path("..") / target.resolve().name)]
    if target.is_symlink():
        return [Problem("output-is-link", target)]
    exists = is_there(target)
    if exists and not target.is_dir():
        return [Problem("output-is-file", target)]
    if exists and not overwrite:
        return [Problem("output-exists", target)]
    problems = link_problems(partial, *names_beside(target))
    if exists and any(target.iterdir()) and not _is_model(target):
        problems.append(Problem("output-no-model", target))
    if is_there(partial) and not partial.is_symlink() and not is_there(_state_file(target)):
        problems.append(Problem("output-not-ours", partial))
    return problems


def _is_model(folder: Path) -> bool:
    """Return True if a folder's config.json describes a model. Other programs use the same file name."""
    file = folder / CONFIG_FILE
    try:
        return file.is_file() and "model_type" in read_json(file)
    except CheckpointError:
        return False


def _partial(target: Path) -> Path:
    return target.parent / f"{target.name}.partial"


def _state_file(target: Path) -> Path:
    # next to the unfinished folder, so that no name inside it is reserved
    return target.parent / f".{target.name}.partial.json"


def check_space(target: Path, needed_bytes: int) -> None:
    """Check that the disk has enough free space, beside what an unfinished run wrote: it is used or removed."""
    parent = nearest_folder(target.resolve().parent)
    free = shutil.disk_usage(parent).free + bytes_in(_partial(target))
    if free < needed_bytes:
        raise CheckpointError(Problem("output-without-space", target, needed=needed_bytes, parent=parent, free=free))


@contextlib.contextmanager
def staged(
    target: Path,
    state: Mapping[str, Any],
    read: Stamps | None = None,
    *,
    overwrite: bool,
    keeps_refused: bool = False,
    is_locked: bool = False,
) -> Iterator[Path]:
    """Yield a folder to write into, and rename it to `target` at the end.

    If the block fails, `target` is not changed.
    """
    # `is_locked`: the caller holds the lock of `target`, and continues to write it
    partial, stamps = _partial(target), read or {}
    try:
        with contextlib.nullcontext() if is_locked else locked(target):
            for beside in names_beside(target):
                remove_unfinished_of(beside)
            settle(target, overwrite=overwrite)
            # after an interruption the folder remains: the next run with the same `state` and the same input files
            # `read` reuses the finished files; any other run starts over
            _prepare(target, state, stamps)
            # after a rejection the folder is removed, unless `keeps_refused`, because the rejected input has to change;
            # a change of a file in `read` during the run is an error
            with _cleared(target, keeps_refused=keeps_refused), _unchanged(stamps):
                yield partial
                sync_folder(partial)
            _rename(partial, target, overwrite=overwrite)
            with contextlib.suppress(OSError):  # the folder is complete; the next run retries
                _state_file(target).unlink()
    except OSError as error:
        code = "output-disk-full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "output-unwritten"
        file, reason = error.filename or partial, error.strerror or error
        raise CheckpointError(Problem(code, target, error=reason, file=file, partial=partial.name)) from error


@contextlib.contextmanager
def _cleared(target: Path, *, keeps_refused: bool) -> Iterator[None]:
    """Remove the unfinished folder after a rejection."""
    try:
        yield
    except SurgeryError as error:
        keeps_refused |= OF_A_MACHINE.issuperset(problem.code for problem in error.problems)
        # without files in it there is nothing to continue
        if not keeps_refused or not any(path.is_file() for path in _partial(target).rglob("*")):
            shutil.rmtree(_partial(target), ignore_errors=True)
            with contextlib.suppress(OSError):
                _state_file(target).unlink()
        raise


@contextlib.contextmanager
def _unchanged(stamps: Stamps) -> Iterator[None]:
    """Check at the end that input files are unchanged.

    It also checks after an error, because a changed file may have caused it.
    """
    try:
        yield
    except Exception as error:
        try:
            check_unchanged(stamps)
        except CheckpointError as changed:
            raise changed from error
        raise
    check_unchanged(stamps)


def _prepare(target: Path, state: Mapping[str, Any], stamps: Stamps) -> None:
    # hard links of an interrupted run change the ctime of a file, but not its size and mtime
    read = {"read": {str(file): [stamp.bytes, stamp.written] for file, stamp in stamps.items()}} if stamps else {}
    wanted = json.dumps({**state, **read}, sort_keys=True)
    partial, state_file = _partial(target), _state_file(target)
    refuse_links(partial, state_file)
    is_same = state_file.is_file() and state_file.read_text(encoding="utf-8") == wanted
    if state_file.exists() and partial.exists() and not is_same:
        shutil.rmtree(partial)
    write_text(state_file, wanted)
    partial.mkdir(exist_ok=True)
    remove_unfinished(partial)


def _rename(partial: Path, target: Path, *, overwrite: bool) -> None:
    if not target.exists():
        partial.rename(target)
    elif overwrite:
        replace_folder(target, partial)
    else:
        raise CheckpointError(Problem("output-appeared", target, partial=partial))
    sync(target.parent)


def bytes_in(folder: Path) -> int:
    """Return the bytes on disk of the files in a folder that no other folder has; 0 if there is no such folder."""
    stats = (path.stat() for path in folder.rglob("*") if path.is_file())
    return sum(stat.st_size for stat in stats if stat.st_nlink == 1)


def sync_folder(folder: Path) -> None:
    """Wait until every file of a folder and its name are on disk."""
    for path in sorted(folder.rglob("*")):
        sync(path)
    sync(folder)
