"""Base shards of a model with duplicated layers: other names in the header, the same data behind it.

    base shard     [length][header: names of the base    ][data]
    stored shard   [length][header: names with positions ][data]      the same bytes of data, in the same order

surgery.json keeps the base's header, so that the base's file is that header and the data, byte for byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.checkpoint.hashes import hash_files
from scale_surgery.checkpoint.numbering import Numbering
from scale_surgery.checkpoint.shards import header_bytes
from scale_surgery.folder.config import stored_shard
from scale_surgery.folder.layout import Content, Headed
from scale_surgery.folder.record import Manifest
from scale_surgery.progress import Progress, no_progress

# of a cache line, and of the widest vectors
ALIGNMENT = 64


def renumbered_shards(base: Checkpoint, numbering: Numbering | None) -> dict[str, str]:
    """Return the base's header of each shard in which a tensor gets another name, by the name of the stored shard."""
    if numbering is None:
        return {}
    shards = sorted({info.file for name, info in base.tensors.items() if numbering.stored(name) != name})
    return {stored_shard(shard): _header_text(base.path / shard) for shard in shards}


def numbering_in(manifest: Manifest) -> Numbering:
    """Return the positions of layers among copies, in a model that has copies."""
    numbering = manifest.plan.numbering
    assert numbering is not None  # read_manifest has seen to it
    return numbering


def stored_shards(base: Checkpoint, numbering: Numbering | None) -> dict[str, Content]:
    """Return the base shards of an expanded folder: files, or their data behind the names with positions."""
    contents: dict[str, Content] = {stored_shard(shard): base.path / shard for shard in base.shards}
    if numbering is not None:
        headers = renumbered_shards(base, numbering)
        for shard in base.shards:
            if header := headers.get(stored_shard(shard)):
                contents[stored_shard(shard)] = Headed(base.path / shard, _renumbered_header(header, numbering))
    return contents


def base_content(path: Path, manifest: Manifest, shard: str) -> Content:
    """Return the base's shard that a stored one was made of: the file, or its data behind the base's own header."""
    file, text = path / shard, manifest.renumbered.get(shard)
    # a header that was changed afterwards stays, so that its hash shows the change
    if text is None or header_bytes(file) != _renumbered_header(text, numbering_in(manifest)):
        return file
    return Headed(file, _with_length(text.encode("utf-8")))


def _header_text(file: Path) -> str:
    return header_bytes(file)[8:].decode("utf-8")


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


def hash_stored(path: Path, manifest: Manifest, names: list[str], advance: Progress = no_progress) -> dict[str, str]:
    """sha256 that the base's files have, by the names that they are stored under in an expanded folder."""
    contents = {name: base_content(path, manifest, name) for name in names}
    hashes = hash_files(path, [name for name, content in contents.items() if not isinstance(content, Headed)], advance)
    for name, content in contents.items():
        if isinstance(content, Headed):
            digest = hashlib.sha256()
            for chunk in content.chunks():
                digest.update(chunk)
                advance(len(chunk))
            hashes[name] = digest.hexdigest()
    return hashes
