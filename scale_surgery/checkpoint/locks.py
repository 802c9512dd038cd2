"""Files beside a folder that is being written: a lock, and a record of the old folder that it replaces.

    OUT.partial  .OUT.partial.json      the folder to be, and what it is to be: see `staging`
    .OUT.lock                           no second process writes either meanwhile
    .OUT.replaced-1a2b3c4d              the old folder, until it is removed
    .OUT.replaced.json                  which folder that is, so that no other is taken for it

Others may be able to write there too, so no symbolic link is followed.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from scale_surgery.checkpoint.files import unfinished_prefix, write_json
from scale_surgery.checkpoint.folder import read_json
from scale_surgery.errors import CheckpointError, Problem

# errors of file systems that lock nothing
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


def link_problems(*places: Path) -> list[Problem]:
    """Names that this program needs and that are symbolic links, which it never makes."""
    return [Problem("link-not-ours", place) for place in places if place.is_symlink()]


def refuse_links(*places: Path) -> None:
    """Refuse symbolic links under names that this program needs."""
    if problems := link_problems(*places):
        raise CheckpointError(*problems)


def names_beside(target: Path) -> tuple[Path, ...]:
    """Files that writing a folder needs beside it, but for the unfinished folder itself."""
    state = target.parent / f".{target.name}.partial.json"
    return state, _lock(target), _record(target)


@contextlib.contextmanager
def locked(folder: Path, called: Path | None = None) -> Iterator[None]:
    """Lock a folder against other processes of this program; `called` is its name in errors."""
    lock = _lock(folder)
    refuse_links(lock)
    try:
        # The kernel drops it when its process dies. A SoftFileLock would not do: its file survives a kill.
        held = FileLock(lock, blocking=False, fallback_to_soft=False).acquire()
    except Timeout as error:
        raise CheckpointError(Problem("output-busy", called or folder)) from error
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno not in NO_LOCKS:
            raise
        raise CheckpointError(Problem("disk-without-locks", called or folder, lock=lock, error=error)) from error
    with held:
        if not lock.is_file() or lock.stat().st_size:
            raise CheckpointError(Problem("lock-not-ours", lock))
        try:
            yield
        finally:
            # Before the release: afterwards the file may be another holder's. Windows removes no open file; there
            # filelock does it after the release. An empty file that stays hinders nobody.
            with contextlib.suppress(OSError):
                lock.unlink(missing_ok=True)


@contextlib.contextmanager
def locked_scratch(target: Path) -> Iterator[Path]:
    """A folder beside an output, where files can be links to those that it takes; what a killed run left in it goes."""
    folder = target.absolute().with_name(f"{unfinished_prefix(target)}alone")
    with locked(folder, called=target):
        refuse_links(folder)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def replace_folder(target: Path, new: Path) -> None:
    """Replace a folder by another and remove it; a record lets `settle` finish after an interruption."""
    old = target.with_name(f".{target.name}.replaced-{secrets.token_hex(4)}")
    inodes = {"inode": target.stat().st_ino, "new": new.stat().st_ino}
    write_json(_record(target), {"folder": old.name, **inodes})
    target.rename(old)
    try:
        new.rename(target)
    except OSError:
        old.rename(target)
        raise
    _remove(target, old)


def settle(target: Path, *, overwrite: bool) -> None:
    """Finish an interrupted `replace_folder`: remove the old folder, or put it back where none replaced it."""
    refuse_links(_record(target))
    old = _put_aside(target)
    if old is not None and target.exists():
        _check_new(target, old)
        _remove(target, old)
        return
    if old is not None:
        old.rename(target)
    _record(target).unlink(missing_ok=True)
    if old is not None and not overwrite:
        raise CheckpointError(Problem("output-put-back", target))


def _check_new(target: Path, old: Path) -> None:
    """Check that the folder at the target is the one that was to replace the old one."""
    if target.stat().st_ino != read_json(_record(target)).get("new"):
        raise CheckpointError(Problem("output-replaced", target, old=old))


def _remove(target: Path, old: Path) -> None:
    """Remove the old folder; where that fails, the next run tries again."""
    with contextlib.suppress(OSError):
        shutil.rmtree(old)
        _record(target).unlink()


def _put_aside(target: Path) -> Path | None:
    """The folder that the record names, if it is that very folder."""
    if not _record(target).is_file():
        return None
    content = read_json(_record(target))
    name = str(content.get("folder"))
    # a plain name, which leads to no other folder
    if not name.startswith(f".{target.name}.replaced-") or name != Path(name).name:
        return None
    old = target.parent / name
    is_folder = old.is_dir() and not old.is_symlink()
    return old if is_folder and old.stat().st_ino == content.get("inode") else None


def _record(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced.json")


def _lock(folder: Path) -> Path:
    # . and .. have a name elsewhere
    named = folder.resolve() if folder.name in ("", "..") else folder
    return named.with_name(f".{named.name}.lock")
