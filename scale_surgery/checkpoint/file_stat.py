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
    """Size, times and number of hard links of a file.

    `changed` moves also when somebody sets the time of writing back, or makes or removes a hard link.
    """

    bytes: int
    written: int
    changed: int
    names: int

    def is_still(self, now: Stamp) -> bool:
        """Whether a file is unchanged."""
        if (self.bytes, self.written) != (now.bytes, now.written):
            return False
        # hard links come and go with outputs that share a shard, and are no change
        return self.changed == now.changed or max(self.names, now.names) > 1


Stamps = Mapping[Path, Stamp]


def take_stamps(files: Iterable[Path]) -> dict[Path, Stamp]:
    """Stamps of files before they are read."""
    try:
        return {file: _stamp(file) for file in files}
    except OSError as error:
        raise CheckpointError(Problem("file-unreadable", error.filename, error=error.strerror)) from error


def check_unchanged(stamps: Stamps) -> None:
    """Refuse files that changed since their stamps were taken."""
    changed = [Problem("file-changed", file) for file, before in stamps.items() if not _is_still(file, before)]
    if changed:
        raise CheckpointError(*changed)


def _stamp(file: Path) -> Stamp:
    status = file.stat()
    return Stamp(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_nlink)


def _is_still(file: Path, before: Stamp) -> bool:
    try:
        return before.is_still(_stamp(file))
    except OSError:
        return False
