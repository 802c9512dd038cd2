"""Base shards of a model with duplicated layers: other names in the header, the same data behind it.

    base shard     [length][header: names of the base    ][data]
    stored shard   [length][header: names with positions ][data]      the same bytes of data, in the same order

surgery.json keeps the base's header, so that the base's file is that header and the data, byte for byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.files import finished_file
from scale_surgery.checkpoint.folder import Checkpoint, read_chunks
from scale_surgery.checkpoint.hashes import hash_files
from scale_surgery.checkpoint.numbering import Numbering
from scale_surgery.checkpoint.shards import header_bytes
from scale_surgery.progress import Progress, no_progress
from scale_surgery.surgery.record import Manifest

# of a cache line, and of the widest vectors
ALIGNMENT = 64


def renumbered_shards(base: Checkpoint, numbering: Numbering | None) -> dict[str, str]:
    """Shards of a base in which a tensor gets another name, each with the text of its header."""
    if numbering is None:
        return {}
    shards = sorted({info.file for name, info in base.tensors.items() if numbering.stored(name) != name})
    return {shard: header_bytes(base.path / shard)[8:].decode("utf-8") for shard in shards}


def numbering_in(manifest: Manifest) -> Numbering:
    """Where layers stand among copies in a model that has some."""
    numbering = manifest.plan.numbering
    assert numbering is not None  # read_manifest has seen to it
    return numbering


def write_renumbered(source: Path, file: Path, numbering: Numbering, advance: Progress = no_progress) -> None:
    """Write a base shard under the names that its tensors get; left alone if it is there, from an interrupted run."""
    header = _renumbered_header(header_bytes(source)[8:].decode("utf-8"), numbering)
    write_with_header(source, file, header, advance)


def _renumbered_header(header: str, numbering: Numbering) -> bytes:
    """A header with the names that tensors get, with its length before it; the same for the same header, always."""
    entries = json.loads(header)
    renamed = {name if name == "__metadata__" else numbering.stored(name): entry for name, entry in entries.items()}
    return aligned_header(renamed, header)


def aligned_header(renamed: Mapping[str, Any], header: str) -> bytes:
    """Entries with other names than in the text of a header as a header, with its length before it."""
    text = json.dumps(renamed, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    # the data begin where they began, modulo ALIGNMENT: loaded tensors are views into the file, and the last bit of a
    # product of one row depends on how they are aligned in memory
    return _with_length(text + b" " * ((len(header.encode("utf-8")) - len(text)) % ALIGNMENT))


def _with_length(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def write_with_header(source: Path, file: Path, header: bytes, advance: Progress = no_progress) -> None:
    """Write a shard with another header, its length before it; left alone if it is there, from an interrupted run."""
    if file.exists():
        advance(file.stat().st_size)
        return
    _write(file, _exchange_header(source, header), advance)


def _exchange_header(file: Path, header: bytes) -> Iterator[bytes]:
    yield header
    yield from read_chunks(file, len(header_bytes(file)))


def _write(file: Path, chunks: Iterable[bytes], advance: Progress) -> None:
    with finished_file(file) as temporary, temporary.open("wb") as stream:
        for chunk in chunks:
            stream.write(chunk)
            advance(len(chunk))


def _read_base_shard(path: Path, manifest: Manifest, shard: str) -> Iterator[bytes]:
    """The base's shard that a stored one was made of; a stored one whose header is not its own, as it is."""
    text, header = manifest.renumbered[shard], header_bytes(path / shard)
    is_as_written = header == _renumbered_header(text, numbering_in(manifest))
    yield from _exchange_header(path / shard, _with_length(text.encode("utf-8")) if is_as_written else header)


def write_base_shard(path: Path, manifest: Manifest, shard: str, file: Path, advance: Progress = no_progress) -> None:
    """Write the base's shard that a stored one, one of `manifest.renumbered`, was made of."""
    _write(file, _read_base_shard(path, manifest, shard), advance)


def hash_stored(path: Path, manifest: Manifest, names: list[str], advance: Progress = no_progress) -> dict[str, str]:
    """sha256 that the base's files have, by the names that they are stored under in an expanded folder."""
    hashes = hash_files(path, [name for name in names if name not in manifest.renumbered], advance)
    for name in names:
        if name in manifest.renumbered:
            digest = hashlib.sha256()
            for chunk in _read_base_shard(path, manifest, name):
                digest.update(chunk)
                advance(len(chunk))
            hashes[name] = digest.hexdigest()
    return hashes
