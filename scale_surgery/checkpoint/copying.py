"""Copy a large file beside the page cache.

A copy that goes through it makes a page for every 4 KiB, only to be written and dropped again: that takes several times
as long as the copying, and pushes the base model out of memory.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from io import FileIO
from pathlib import Path

Passing = Callable[[memoryview], None]
BLOCK_BYTES = 1 << 23


def unseen(block: memoryview) -> None:
    """Let bytes pass."""


def copy_file(source: Path, file: Path, passing: Passing = unseen) -> None:
    """Copy the bytes of a file; blocks of them go straight to the disk where the file system can do that.

    Args:
        source: The file.
        file: The file to be; replaced if it is there.
        passing: Called with each block before it is written, to be read now and not kept.

    Raises:
        OSError: If it cannot be copied; both files are named.
    """
    with FileIO(source) as read, FileIO(file, "w") as written:
        try:
            _copy(read, written, passing)
        except OSError as error:
            error.filename, error.filename2 = str(source), str(file)  # as shutil does
            raise


def _copy(read: FileIO, written: FileIO, passing: Passing) -> None:
    # pages of its own: a disk takes only memory that begins with one
    buffer = memoryview(mmap.mmap(-1, BLOCK_BYTES))
    _set_direct(written, is_on=True)
    while size := read.readinto(buffer):
        if size < BLOCK_BYTES:
            _set_direct(written, is_on=False)  # the end of a file is not a whole number of disk blocks
        passing(buffer[:size])
        _write(written, buffer[:size])


def _write(stream: FileIO, left: memoryview) -> None:
    while left:
        try:
            left = left[stream.write(left) :]
        except OSError as error:
            if error.errno != errno.EINVAL or not _is_direct(stream):
                raise
            _set_direct(stream, is_on=False)


def _is_direct(stream: FileIO) -> bool:
    import fcntl  # not on Windows

    return bool(fcntl.fcntl(stream, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0))


def _set_direct(stream: FileIO, *, is_on: bool) -> None:
    import fcntl

    direct = getattr(os, "O_DIRECT", 0)  # on Linux alone
    flags = fcntl.fcntl(stream, fcntl.F_GETFL)
    try:
        fcntl.fcntl(stream, fcntl.F_SETFL, flags | direct if is_on else flags & ~direct)
    except OSError as error:
        if error.errno != errno.EINVAL:  # not on this file system
            raise
