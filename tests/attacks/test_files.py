"""Files that lie about themselves: headers, names that lead elsewhere, pickles under another name."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError, safe_open

from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.checkpoint.names import INDEX_FILE, SINGLE_FILE, is_inside
from scale_surgery.errors import CheckpointError
from tests.conftest import edited, refusal
from tests.fuzz.files import Planted

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def refused(folder: Path) -> str:
    return refusal(open_checkpoint, folder, error=CheckpointError)


# headers


def header(length: int | None = None, data: int = 8, **tensors: Any) -> bytes:
    """A safetensors file of one header and zeros behind it."""
    return framed(json.dumps(tensors).encode(), length, data)


def framed(text: bytes, length: int | None = None, data: int = 8) -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data)


def entry(shape: list[Any], begin: int = 0, end: int = 8, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HEADERS = {
    "no end": (header(2**63, w=ENTRY), "promise a header of 9223372036854775808 bytes in a file of"),
    "100 MB": (header(100_000_001, w=ENTRY), "promise a header of 100000001 bytes in a file of"),
    "beyond the file": (header(w=entry([2], 0, 16)), "w ends at byte"),
    "overlap": (
        header(a=entry([2]), b=entry([1], 4, 8)),
        ", where the tensor before it ends. It is damaged: download it again.",
    ),
    "the same bytes": (header(a=entry([2]), b=entry([2])), "begins at byte"),
    "a hole": (header(data=12, w=entry([2], 4, 12)), "w begins at byte"),
    "hidden bytes": (
        header(data=64, w=ENTRY),
        "the file has 133 bytes. It is damaged: download it again.",
    ),
    "backwards": (header(w=entry([2], 8, 0)), "w has -8 bytes, expected 8"),
    "before the data": (header(w=entry([2], -8, 0)), "w begins at byte"),
    "negative": (header(w=entry([-2])), "w has 8 bytes, expected -8 for shape (-2,) in F32"),
    "twice negative": (header(w=entry([-1, -2])), "its header is not that of a safetensors file"),
    "overflowing": (header(w=entry([2**63, 2])), "w has 8 bytes, expected 73786976294838206464 for shape"),
    "overflowing to nothing": (header(data=0, w=entry([2**32, 2**32], 0, 0)), "w has 0 bytes, expected"),
    "a fraction": (header(w=entry([2.0])), "its header is not that of a safetensors file"),
    "other bytes": (header(data=20, w=entry([2, 3], 0, 20)), "w has 20 bytes, expected 24 for shape (2, 3) in F32"),
    "unknown type": (header(w=entry([2], dtype="O8")), "its header is not that of a safetensors file"),
    "twice": (
        framed(b'{"w":' + json.dumps(entry([2])).encode() + b',"w":' + json.dumps(entry([1], 4, 8)).encode() + b"}"),
        "w begins at byte",
    ),
    "deep": (framed(b'{"a":' * 5000 + b"1" + b"}" * 5000), "its header is not that of a safetensors file"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_lie(llama_base: Path, name: str) -> None:
    content, message = HEADERS[name]
    (llama_base / SINGLE_FILE).write_bytes(content)
    problem = refused(llama_base)
    assert problem.startswith(f"{SINGLE_FILE}: ") and message in problem, problem
    # and what others would make of it is none of ours: the file is refused by its own library too
    with pytest.raises(SafetensorError), safe_open(llama_base / SINGLE_FILE, framework="np"):
        pass


# names


@pytest.mark.parametrize(
    "file", ("../x.safetensors", "/etc/x.safetensors", "a/../../x", "..\\x", "a\0b.safetensors", "./x", "\ud800", 7, "")
)
def test_an_index_that_leaves_the_folder(sharded_base: Path, file: object) -> None:
    with edited(sharded_base / INDEX_FILE) as index:
        index["weight_map"]["model.norm.weight"] = file
    if file == "\ud800":
        assert "it holds half a character" in refused(sharded_base)
        return
    wanted = f"{INDEX_FILE}: model.norm.weight is said to lie in {file!r}, expected a file inside the folder."
    assert refused(sharded_base) == f"{wanted} Do not use this checkpoint before you know who made it."


def test_what_is_inside() -> None:
    assert is_inside("a")
    assert is_inside("a/b..c/d.txt")
    assert not any(is_inside(name) for name in ("", ".", "..", "a/..", "/a", "\\a", "a\\b", "a\0", "./a", None, 3))


# pickles


def test_a_pickle_that_is_called_safetensors_or_that_an_index_names(
    llama_base: Path, sharded_base: Path, tmp_path: Path
) -> None:
    planted = pickle.dumps(Planted(tmp_path / "it-ran"))
    (llama_base / SINGLE_FILE).write_bytes(planted)
    assert "It is truncated or not a safetensors file" in refused(llama_base)
    (sharded_base / "shard.bin").write_bytes(planted)
    with edited(sharded_base / INDEX_FILE) as index:
        index["weight_map"]["model.norm.weight"] = "shard.bin"
    assert "shard.bin: its first 8 bytes promise a header" in refused(sharded_base)
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.parametrize("name", ("pytorch_model.bin", "consolidated.00.pth", "model.ckpt"))
def test_pickled_weights_are_refused_with_the_way_out(llama_base: Path, tmp_path: Path, name: str) -> None:
    (llama_base / SINGLE_FILE).unlink()
    (llama_base / name).write_bytes(pickle.dumps(Planted(tmp_path / "it-ran")))
    message = refused(llama_base)
    assert f"found only pickled weights ({name}), expected model.safetensors" in message
    assert "convert them once, where you trust them: AutoModelForCausalLM.from_pretrained(OLD)" in message
    assert not (tmp_path / "it-ran").exists()
