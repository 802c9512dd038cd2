"""Whether a file that is read stays as it is until everything that was made of it is written.

A run that reads for minutes would otherwise write one half of the model that was there, and one of what it became.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from scale_surgery.errors import CheckpointError, shorten


@dataclass(frozen=True)
class Stamp:
    """What the system says of a file without reading it: its bytes, when it was written and changed, its names.

    `changed` moves also when somebody sets the time of writing back, or makes or removes a hard link.
    """

    bytes: int
    written: int
    changed: int
    names: int

    def is_still(self, now: Stamp) -> bool:
        """Whether a file is as it was."""
        if (self.bytes, self.written) != (now.bytes, now.written):
            return False
        # hard links come and go with outputs that share a shard, and are no change
        return self.changed == now.changed or max(self.names, now.names) > 1


Stamps = Mapping[Path, Stamp]


def take_stamps(files: Iterable[Path]) -> dict[Path, Stamp]:
    """Look at files before they are read."""
    try:
        return {file: _stamp(file) for file in files}
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read ({error.strerror}). Download it again.") from error


def check_unchanged(stamps: Stamps) -> None:
    """Check that files are what they were when they were first read."""
    changed = [str(file) for file, before in stamps.items() if not _is_still(file, before)]
    if changed:
        raise CheckpointError.from_problems(
            shorten([f"{file}: changed while it was read. Run again when nothing writes to it." for file in changed])
        )


def _stamp(file: Path) -> Stamp:
    found = file.stat()
    return Stamp(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_nlink)


def _is_still(file: Path, before: Stamp) -> bool:
    try:
        return before.is_still(_stamp(file))
    except OSError:
        return False
