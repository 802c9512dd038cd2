"""Write single files, whole or not at all: small texts, JSON, tensors.

Also how a file of the base model gets into another folder: as a reflink, a copy or a hard link, never by being read and
written again as tensors.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from scale_surgery.errors import CheckpointError, PlanError, Problem
from scale_surgery.progress import Progress, no_progress

if TYPE_CHECKING:
    from torch import Tensor

BaseWeights = Literal["auto", "copy", "link"]
# prefix of the folders in which files are written before they get their names
UNFINISHED = ".scale-surgery-unfinished-"
# errors of a disk that is full, over quota, read-only or broken
UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)
# errors of a path that does not exist
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP)
COPIED_AT_ONCE = 1 << 23
FICLONE = 0x40049409  # Linux ioctl: share the blocks of another file until one of the two is written


def is_there(path: Path) -> bool:
    """Return True if a path exists; raise an error if that cannot be found out, as `exists` does before Python 3.14."""
    try:
        path.stat()
    except OSError as error:
        if error.errno in ABSENT:
            return False
        raise
    return True


def nearest_folder(path: Path) -> Path:
    """Return a path if there is something, or the nearest folder above it that exists."""
    place = path.resolve()
    return next(folder for folder in (place, *place.parents) if is_there(folder))


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    if sys.platform == "win32":  # it opens no folder, and syncs only files that are open for writing
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # some file systems cannot sync the names in a folder
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)):
            raise
    finally:
        os.close(handle)


@contextlib.contextmanager
def finished_file(file: Path) -> Iterator[Path]:
    """Give a temporary file to write; when the block ends well it becomes `file`, on disk, readable as usual."""
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        # a private folder: nobody else can put a link there; safetensors' writer makes a second file beside its own
        folder = tempfile.mkdtemp(prefix=unfinished_prefix(file), dir=file.parent)
        try:
            temporary = Path(folder, file.name)
            yield temporary
            if temporary.stat().st_nlink == 1:
                # safetensors writes 0600; a hard link shares its mode with the base, which is not ours to change
                temporary.chmod(0o666 & ~_umask())
            sync(temporary)
            temporary.replace(file)
        finally:
            # removal may fail once on a disk with errors
            for _ in range(2):
                shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        if UNFINISHED not in str(error.filename):
            raise
        raise OSError(error.errno, error.strerror, str(file)) from error


def remove_unfinished(folder: Path) -> None:
    """Remove unfinished files that a killed run left in a folder, at any depth."""
    for left in list(folder.rglob(f"{UNFINISHED}*")):
        shutil.rmtree(left, ignore_errors=True)


def remove_unfinished_of(file: Path) -> None:
    """Remove what killed runs left of one file, which no other process may be writing."""
    for left in list(file.parent.glob(f"{unfinished_prefix(file)}*")):
        shutil.rmtree(left, ignore_errors=True)


def unfinished_prefix(file: Path) -> str:
    """Prefix of the folders in which a file is written; the name itself may leave no room for it."""
    return f"{UNFINISHED}{hashlib.sha256(os.fsencode(file.name)).hexdigest()[:8]}-"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_text(file: Path, text: str) -> None:
    """Write a small text file, whole or not at all, without translating line ends."""
    with finished_file(file) as temporary:
        temporary.write_bytes(text.encode("utf-8"))


def write_bytes(file: Path, chunks: Iterable[bytes], advance: Progress = no_progress) -> None:
    """Write a file of chunks, whole or not at all."""
    with finished_file(file) as temporary, temporary.open("wb") as stream:
        for chunk in chunks:
            stream.write(chunk)
            advance(len(chunk))


def as_json(content: Mapping[str, Any]) -> str:
    """A JSON object as the text that this program writes."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def plain_json(content: Mapping[str, Any]) -> dict[str, Any]:
    """Plain JSON values, with texts in place of paths, NaN and infinity."""
    plain: dict[str, Any] = json.loads(json.dumps(content, default=str), parse_constant=str)
    return plain


def to_json(result: Any) -> dict[str, Any]:
    """Return a result as plain JSON values."""
    content: dict[str, Any] = result.to_json() if hasattr(result, "to_json") else plain_json(asdict(result))
    return content


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object, whole or not at all."""
    write_text(file, as_json(content))


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file, whole or not at all."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with finished_file(file) as temporary:
        try:
            save_file(dict(tensors), temporary, metadata={"format": "pt"})
        except SafetensorError as error:
            number = _system_error(error) or errno.EIO
            raise OSError(number, os.strerror(number), str(file)) from error


def _system_error(error: Exception) -> int | None:
    """Errno of an error, such as a full disk; safetensors gives it only in its text."""
    if isinstance(error, OSError):
        return error.errno
    match = re.search(r"os error (\d+)", str(error)) if type(error).__name__ == "SafetensorError" else None
    return int(match[1]) if match else None


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder; a disk on which it cannot be written is a CheckpointError."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    except Exception as error:
        number = _system_error(error)
        # tempdir is None where no folder can be written to
        if number not in UNWRITTEN and not (isinstance(error, OSError) and tempfile.tempdir is None):
            raise
        place, reason = tempfile.tempdir or "temporary files", os.strerror(number or errno.EIO)
        raise CheckpointError(Problem("temporary-unwritten", place, error=reason)) from error


def check_base_weights(how: str) -> None:
    """Refuse an unknown way to take files over."""
    if how not in get_args(BaseWeights):
        raise PlanError(Problem("base-weights-unknown", "base_weights", how=how, choices=get_args(BaseWeights)))


def way_to(target: Path, source: Path, how: BaseWeights) -> BaseWeights:
    """Return how a file of a base will get into a folder: "copy" if the disk of the folder makes no reflink of it.

    Raises:
        CheckpointError: If hard links are wanted, and the folder is on another disk than the file.
    """
    parent, real = nearest_folder(target.resolve().parent), source.resolve()
    if how == "link" and real.stat().st_dev != parent.stat().st_dev:
        raise CheckpointError(Problem("hard-link-failed", source, folder=parent, error=os.strerror(errno.EXDEV)))
    if how != "auto":
        return how
    with tempfile.TemporaryDirectory(prefix=unfinished_prefix(target), dir=parent) as folder:
        return "auto" if _reflink(real, Path(folder, "shared")) else "copy"


def makes_links(folder: Path) -> bool:
    """Return True if the disk of a folder, which need not exist yet, makes hard links."""
    try:
        with tempfile.TemporaryDirectory(prefix=unfinished_prefix(folder), dir=nearest_folder(folder)) as place:
            (tried := Path(place, "file")).touch()
            Path(place, "link").hardlink_to(tried)
    except OSError:
        return False
    return True


def take_over(source: Path, file: Path, how: BaseWeights, advance: Progress = no_progress) -> None:
    """Make `file` of a base's `source`: "auto" by a reflink, else a copy, "copy", or "link" (hard links of shards)."""
    check_base_weights(how)
    real = source.resolve()
    left = real.stat().st_size
    # a file that is there already, from an interrupted run, is left alone
    if not file.exists() or file.stat().st_size != left:
        with finished_file(file) as temporary:
            if how == "link" and file.suffix == ".safetensors":
                _link(real, temporary, file.parent)
            elif how == "copy" or not _reflink(real, temporary):
                left = _copy(real, temporary, left, advance)
    # the last bytes count when the file has its name
    advance(left)


def _copy(source: Path, file: Path, size: int, advance: Progress) -> int:
    """Copy block by block; the last block, whose bytes are returned, is not done before the file has its name."""
    # shutil says nothing until a shard of many gigabytes is there
    try:
        with source.open("rb") as read, file.open("wb") as written:
            while block := read.read(COPIED_AT_ONCE):
                written.write(block)
                if len(block) < size:
                    size -= len(block)
                    advance(len(block))
    except OSError as error:
        error.filename, error.filename2 = str(source), str(file)
        raise
    return size


def _link(source: Path, file: Path, folder: Path) -> None:
    try:
        os.link(source, file)
    except OSError as error:
        raise CheckpointError(Problem("hard-link-failed", source, folder=folder, error=error.strerror)) from error


def _reflink(source: Path, file: Path) -> bool:
    if sys.platform != "linux":
        return False
    import fcntl

    try:
        with source.open("rb") as read, file.open("wb") as written:
            fcntl.ioctl(written, FICLONE, read.fileno())
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        return False
    return True
