"""Check that input files stay the same until the output is written.

A run that reads for minutes could otherwise mix two versions of a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from scale_surgery.errors import CheckpointError, Problem


@dataclass(frozen=True)
class Stamp:
    """The size, the times and the number of hard links of a file.

    `changed` (ctime) also changes if the modification time is set back, or if a hard link is added or removed.
    """

    bytes: int
    written: int
    changed: int
    names: int

    def is_still(self, now: Stamp) -> bool:
        """Return True if the file is unchanged."""
        if (self.bytes, self.written) != (now.bytes, now.written):
            return False
        # outputs may share a shard, so a changed number of hard links is not a change of the file
        return self.changed == now.changed or max(self.names, now.names) > 1


Stamps = Mapping[Path, Stamp]


def take_stamps(files: Iterable[Path]) -> dict[Path, Stamp]:
    """Take the stamps of files before they are read."""
    try:
        return {file: _stamp(file) for file in files}
    except OSError as error:
        raise CheckpointError(Problem("file-unreadable", error.filename, error=error.strerror)) from error


def check_unchanged(stamps: Stamps) -> None:
    """Check that files have not changed since their stamps were taken."""
    changed = [Problem("file-changed", file) for file, before in stamps.items() if not _is_still(file, before)]
    if changed:
        raise CheckpointError(*changed)


def _stamp(file: Path) -> Stamp:
    status = file.stat()
    return Stamp(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_nlink)


def _is_still(file: Path, before: Stamp) -> bool:
    try:
        return before.is_still(_stamp(file))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:  # a disk that does not answer, which says nothing of the file
        raise CheckpointError(Problem("file-unreadable", file, error=error.strerror)) from error
