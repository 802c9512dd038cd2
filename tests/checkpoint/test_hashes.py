"""sha256 of files and their tensors in one pass are those of each by itself."""

from __future__ import annotations

import hashlib
import json

import pytest

from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.checkpoint.hashes import Sums, hash_all, hash_files, hash_tensors
from tests.conftest import flip


@pytest.mark.parametrize("chunk_bytes", (100, 1 << 22))
def test_one_pass_gives_the_sums_of_each(sharded_base, monkeypatch, chunk_bytes):
    monkeypatch.setattr("scale_surgery.checkpoint.folder.CHUNK_BYTES", chunk_bytes)
    checkpoint = open_checkpoint(sharded_base)
    assert len(checkpoint.shards) > 1
    names, seen = [*checkpoint.shards, *checkpoint.side_files], []
    hashes = hash_all(checkpoint, names, seen.append)
    assert hashes.files == hash_files(sharded_base, names)
    assert hashes.tensors == hash_tensors(checkpoint, list(checkpoint.tensors))
    assert sum(seen) == sum((sharded_base / name).stat().st_size for name in names), "each byte is read once"


def test_an_empty_tensor_behind_the_one_at_its_offset(tmp_path, monkeypatch):
    """A header may list names in any order."""
    monkeypatch.setattr("scale_surgery.checkpoint.folder.CHUNK_BYTES", 24)
    header = {
        "a": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]},
        "z": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(range(32)))
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    hashes = hash_all(checkpoint, list(checkpoint.shards))
    assert hashes.tensors == hash_tensors(checkpoint, ["a", "z"])
    assert hashes.tensors["z"] == hashlib.sha256(b"").hexdigest()


def test_one_byte_changes_the_sums_of_its_file_and_its_tensor_alone(sharded_base):
    checkpoint = open_checkpoint(sharded_base)
    before = hash_all(checkpoint, list(checkpoint.shards))
    info = list(checkpoint.tensors.values())[5]
    flip(sharded_base / info.file, info.offset)
    after = hash_all(checkpoint, list(checkpoint.shards))
    pairs = ((before.files, after.files), (before.tensors, after.tensors))
    changed = [{name for name in first if first[name] != second[name]} for first, second in pairs]
    assert changed == [{info.file}, {info.name}]


def test_a_file_without_tensors_is_hashed_whole(sharded_base):
    checkpoint = open_checkpoint(sharded_base)
    assert hash_all(checkpoint, ["config.json"]) == Sums(hash_files(sharded_base, ["config.json"]), {})
