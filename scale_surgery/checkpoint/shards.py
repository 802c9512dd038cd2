"""Write a safetensors file tensor by tensor, with at most one tensor in memory.

A file is 8 bytes of header length, the header as JSON, and the tensors' bytes one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from scale_surgery.checkpoint.files import finished_file
from scale_surgery.checkpoint.folder import Checkpoint, read_chunks
from scale_surgery.checkpoint.headers import DTYPE_BYTES, MAX_HEADER_BYTES
from scale_surgery.errors import CheckpointError, Problem
from scale_surgery.progress import Progress, no_progress

if TYPE_CHECKING:
    from torch import Tensor

HEADER_ALIGNMENT = 8


@dataclass(frozen=True)
class Entry:
    """A tensor of a new file: its name, dtype (safetensors' name), shape, bytes, and the source of these."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    read: Callable[[], Iterable[bytes | memoryview]]


def stored(checkpoint: Checkpoint, name: str) -> Entry:
    """Return the entry of a tensor whose bytes are copied from disk."""
    info = checkpoint.tensors[name]
    return Entry(
        name,
        info.dtype,
        info.shape,
        info.bytes,
        lambda: read_chunks(checkpoint.path / info.file, info.offset, info.bytes),
    )


def computed(name: str, dtype: str, shape: tuple[int, ...], make: Callable[[], Tensor]) -> Entry:
    """Return the entry of a tensor that is computed during writing."""
    return Entry(name, dtype, shape, prod(shape) * DTYPE_BYTES[dtype], lambda: [tensor_bytes(make())])


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes in row-major order, as in a file. A contiguous tensor on the CPU is not copied."""
    import torch

    content: memoryview = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
    return content


def make_header(entries: Iterable[Entry]) -> tuple[bytes, list[Entry]]:
    """Return the header of a file with its length in front, and the tensors in file order."""
    # in the order of safetensors' writer: wide dtypes first, so that each tensor is aligned
    ordered = sorted(entries, key=lambda entry: (-DTYPE_BYTES.get(entry.dtype, 1), entry.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in ordered:
        begin, end = end, end + entry.size
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, ordered


def write_pieces(file: Path, header: bytes, ordered: Iterable[Entry], advance: Progress = no_progress) -> None:
    """Write a safetensors file atomically: a header and its tensors in order."""
    with finished_file(file) as temporary, temporary.open("wb") as stream:
        stream.write(header)
        for entry in ordered:
            written = 0
            for piece in entry.read():
                stream.write(piece)
                written += len(piece)
            if written != entry.size:
                raise CheckpointError(Problem("tensor-bytes", entry.name, written=written, needed=entry.size))
            advance(written)


def header_bytes(file: Path) -> bytes:
    """Return the header of a safetensors file with its length in front, byte for byte."""
    with file.open("rb") as stream:
        length = stream.read(8)
        return length + stream.read(min(int.from_bytes(length, "little"), MAX_HEADER_BYTES))


def entries_of(header: bytes, read: Mapping[str, Callable[[], Iterable[bytes | memoryview]]]) -> Iterator[Entry]:
    """Yield the tensors of a header in file order, each with the source of its bytes."""
    listed = {name: entry for name, entry in json.loads(header[8:]).items() if name != "__metadata__"}
    for name, entry in sorted(listed.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        yield Entry(name, entry["dtype"], tuple(entry["shape"]), end - begin, read[name])
