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
    """Shards of a base in which a tensor gets another name, each with the text of its header.

    Args:
        base: The base.
        numbering: Where its layers stand among copies; None where no layer is duplicated.
    """
    if numbering is None:
        return {}
    shards = sorted({info.file for name, info in base.tensors.items() if numbering.stored(name) != name})
    return {shard: header_bytes(base.path / shard)[8:].decode("utf-8") for shard in shards}


def renumbered_header(header: str, numbering: Numbering) -> bytes:
    """A header with the names that tensors get, with its length before it; the same for the same header, always."""
    entries = json.loads(header)
    renamed = {name if name == "__metadata__" else numbering.stored(name): entry for name, entry in entries.items()}
    return aligned_header(renamed, header)


def aligned_header(renamed: Mapping[str, Any], header: str) -> bytes:
    """Entries with other names as a header, with its length before it.

    The data begin where they began, modulo ALIGNMENT: loaded tensors are views into the file, and the last bit of a
    product of one row depends on how they are aligned in memory.

    Args:
        renamed: Entries of tensors by their new names.
        header: Text of the header with the names that they had.
    """
    text = json.dumps(renamed, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    return with_length(text + b" " * ((len(header.encode("utf-8")) - len(text)) % ALIGNMENT))


def with_length(text: bytes) -> bytes:
    """The text of a header with its length before it, as it begins a file."""
    return len(text).to_bytes(8, "little") + text


def behind_header(file: Path, header: bytes) -> Iterator[bytes]:
    """The bytes of a shard with another header.

    Args:
        file: The shard.
        header: The header, with its length before it.
    """
    yield header
    yield from read_chunks(file, len(header_bytes(file)))


def write_renumbered(source: Path, file: Path, numbering: Numbering, advance: Progress = no_progress) -> None:
    """Write a base shard under the names that its tensors get; left alone if it is there, from an interrupted run.

    Args:
        source: The base's file.
        file: The file to be.
        numbering: Where layers stand among copies.
        advance: Called with the bytes done.
    """
    header = renumbered_header(header_bytes(source)[8:].decode("utf-8"), numbering)
    write_with_header(source, file, header, advance)


def write_with_header(source: Path, file: Path, header: bytes, advance: Progress = no_progress) -> None:
    """Write a shard with another header; left alone if it is there, from an interrupted run.

    Args:
        source: The shard.
        file: The file to be.
        header: Its header, with the length before it.
        advance: Called with the bytes done.
    """
    if file.exists():
        advance(file.stat().st_size)
        return
    _write(file, behind_header(source, header), advance)


def _write(file: Path, chunks: Iterable[bytes], advance: Progress) -> None:
    with finished_file(file) as temporary, temporary.open("wb") as stream:
        for chunk in chunks:
            stream.write(chunk)
            advance(len(chunk))


def read_base_shard(file: Path, header: str, numbering: Numbering) -> Iterator[bytes]:
    """The base's shard that a stored one was made of; a stored one whose header is not its own, as it is.

    Args:
        file: The stored shard.
        header: Text of the base's header, from surgery.json.
        numbering: Where layers stand among copies.
    """
    own = header_bytes(file)
    is_as_written = own == renumbered_header(header, numbering)
    yield from behind_header(file, with_length(header.encode("utf-8")) if is_as_written else own)


def write_base_shard(path: Path, manifest: Manifest, shard: str, file: Path, advance: Progress = no_progress) -> None:
    """Write the base's shard that a stored one was made of.

    Args:
        path: The expanded folder.
        manifest: Its surgery.json.
        shard: The stored shard, one of `manifest.renumbered`.
        file: The file to be.
        advance: Called with the bytes done.
    """
    _write(file, read_base_shard(path / shard, manifest.renumbered[shard], numbering_in(manifest)), advance)


def hash_stored(path: Path, manifest: Manifest, names: list[str], advance: Progress = no_progress) -> dict[str, str]:
    """sha256 that the base's files have, by the names that they are stored under.

    Args:
        path: The expanded folder.
        manifest: Its surgery.json.
        names: Names in the folder.
        advance: Called with the bytes done.
    """
    plain = [name for name in names if name not in manifest.renumbered]
    hashes = hash_files(path, plain, advance)
    for name in names:
        if name in manifest.renumbered:
            digest = hashlib.sha256()
            for chunk in read_base_shard(path / name, manifest.renumbered[name], numbering_in(manifest)):
                digest.update(chunk)
                advance(len(chunk))
            hashes[name] = digest.hexdigest()
    return hashes


def numbering_in(manifest: Manifest) -> Numbering:
    """Where layers stand among copies in a model that has some."""
    found = manifest.plan.numbering
    assert found is not None  # read_manifest has seen to it
    return found
