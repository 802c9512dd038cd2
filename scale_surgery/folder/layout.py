"""The content of each file of a folder to be, as a value, and one function that writes them.

Path      taken over as a file: a reflink, a copy or a hard link
Headed    the data of a shard behind another header
Shard     tensors, each read or made when its turn comes
str       a text
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.files import BaseWeights, take_over, way_to, write_bytes, write_text
from scale_surgery.checkpoint.folder import read_chunks
from scale_surgery.checkpoint.headers import TensorInfo, read_header
from scale_surgery.checkpoint.shards import Entry, header_bytes, make_header, write_pieces
from scale_surgery.progress import Progress, no_progress


@dataclass(frozen=True)
class Headed:
    """A shard with another header, its length before it, and the data of a file that lies elsewhere."""

    file: Path
    header: bytes

    def chunks(self) -> Iterator[bytes]:
        """Read its bytes."""
        yield self.header
        yield from read_chunks(self.file, len(header_bytes(self.file)))


@dataclass(frozen=True)
class Shard:
    """A shard of tensors: its header, with its length before it, and the tensors in the order of their data."""

    header: bytes
    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Shard:
        """Make the header of a new shard."""
        header, ordered = make_header(entries)
        return cls(header, tuple(ordered))


Content = Path | Headed | Shard | str
Contents = Mapping[str, Content]


def bytes_of(content: Content) -> int:
    """Return the size that a file will have."""
    match content:
        case Path():
            return content.stat().st_size
        case Headed():
            return len(content.header) + content.file.stat().st_size - len(header_bytes(content.file))
        case Shard():
            return len(content.header) + sum(entry.size for entry in content.entries)
        case str():
            return len(content.encode("utf-8"))


def total_bytes(contents: Contents) -> int:
    """Return the size of all files, for a progress bar."""
    return sum(map(bytes_of, contents.values()))


def needed_bytes(contents: Contents, how: BaseWeights) -> int:
    """Return the least bytes that the files need on disk: a reflink needs none, but may not work."""
    return total_bytes({name: each for name, each in contents.items() if how == "copy" or not isinstance(each, Path)})


def room_for(contents: Contents, target: Path, how: BaseWeights) -> int:
    """Return the bytes that the files need on the disk of a folder; refuse hard links that it cannot have."""
    shards = [each for name, each in contents.items() if name.endswith(".safetensors") and isinstance(each, Path)]
    return needed_bytes(contents, way_to(target, shards[0], how) if shards else how)


def lay_out(contents: Contents, folder: Path, how: BaseWeights = "copy", advance: Progress = no_progress) -> None:
    """Write files into a folder; those of an interrupted run stay."""
    for name, content in contents.items():
        file = folder / name
        match content:
            case Path():
                take_over(content, file, how, advance)
            case str():
                write_text(file, content)
                advance(bytes_of(content))
            case _ if file.exists():
                advance(bytes_of(content))
            case Headed():
                write_bytes(file, content.chunks(), advance)
            case Shard():
                advance(len(content.header))
                write_pieces(file, content.header, content.entries, advance)


def make_index(tensors: Iterable[TensorInfo]) -> dict[str, Any]:
    """Make the index of a checkpoint with these tensors."""
    tensors = list(tensors)
    weight_map = {info.stored_as or info.name: info.file for info in tensors}
    total = sum(info.bytes for info in tensors)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def tensors_in(folder: Path, shards: Iterable[str]) -> Iterator[TensorInfo]:
    """Read what shards of a folder hold, by the names in the files."""
    for shard in shards:
        yield from read_header(folder, shard).values()
