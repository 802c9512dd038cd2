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
from scale_surgery.errors import CheckpointError, Problem
from tests.conftest import edited, problems
from tests.fuzz.files import Planted

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def refused(folder: Path) -> Problem:
    """The problem for which a folder is not opened."""
    (problem,) = problems(open_checkpoint, folder, error=CheckpointError)
    return problem


# headers


def header(length: int | None = None, data: int = 8, **tensors: Any) -> bytes:
    """A safetensors file of one header and zeros behind it."""
    return framed(json.dumps(tensors).encode(), length, data)


def framed(text: bytes, length: int | None = None, data: int = 8) -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data)


def entry(shape: list[Any], begin: int = 0, end: int = 8, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HEADERS: dict[str, tuple[bytes, str, dict[str, Any]]] = {
    "no end": (header(2**63, w=ENTRY), "header-length", {"length": 2**63}),
    "100 MB": (header(100_000_001, w=ENTRY), "header-length", {"length": 100_000_001}),
    "beyond the file": (header(w=entry([2], 0, 16)), "tensor-past-end", {"tensor": "w"}),
    "overlap": (header(a=entry([2]), b=entry([1], 4, 8)), "tensor-offset", {"tensor": "b"}),
    "the same bytes": (header(a=entry([2]), b=entry([2])), "tensor-offset", {"tensor": "b"}),
    "a hole": (header(data=12, w=entry([2], 4, 12)), "tensor-offset", {"tensor": "w"}),
    "hidden bytes": (header(data=64, w=ENTRY), "tensors-end-early", {"end": 77, "size": 133}),
    "backwards": (header(w=entry([2], 8, 0)), "tensor-size", {"tensor": "w", "bytes": -8, "needed": 8}),
    "before the data": (header(w=entry([2], -8, 0)), "tensor-offset", {"tensor": "w"}),
    "negative": (header(w=entry([-2])), "tensor-size", {"bytes": 8, "needed": -8, "shape": "(-2,)"}),
    "twice negative": (header(w=entry([-1, -2])), "header-invalid", {}),
    "overflowing": (header(w=entry([2**63, 2])), "tensor-size", {"bytes": 8, "needed": 2**66}),
    "overflowing to nothing": (header(data=0, w=entry([2**32, 2**32], 0, 0)), "tensor-size", {"bytes": 0}),
    "a fraction": (header(w=entry([2.0])), "header-invalid", {}),
    "other bytes": (header(data=20, w=entry([2, 3], 0, 20)), "tensor-size", {"bytes": 20, "needed": 24}),
    "unknown type": (header(w=entry([2], dtype="O8")), "header-invalid", {}),
    "twice": (
        framed(b'{"w":' + json.dumps(entry([2])).encode() + b',"w":' + json.dumps(entry([1], 4, 8)).encode() + b"}"),
        "tensor-offset",
        {"tensor": "w"},
    ),
    "deep": (framed(b'{"a":' * 5000 + b"1" + b"}" * 5000), "header-invalid", {}),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_lie(llama_base: Path, name: str) -> None:
    content, code, values = HEADERS[name]
    (llama_base / SINGLE_FILE).write_bytes(content)
    problem = refused(llama_base)
    assert (problem.code, problem.where) == (code, SINGLE_FILE) and problem.values.items() >= values.items()
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
        problem = refused(sharded_base)
        assert problem.code == "json-unreadable" and "it holds half a character" in problem.values["error"]
        return
    assert refused(sharded_base) == Problem("index-escape", INDEX_FILE, tensor="model.norm.weight", file=file)


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
    assert (refused(llama_base).code, refused(llama_base).where) == ("header-length", SINGLE_FILE)
    (sharded_base / "shard.bin").write_bytes(planted)
    with edited(sharded_base / INDEX_FILE) as index:
        index["weight_map"]["model.norm.weight"] = "shard.bin"
    assert (refused(sharded_base).code, refused(sharded_base).where) == ("header-length", "shard.bin")
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.parametrize("name", ("pytorch_model.bin", "consolidated.00.pth", "model.ckpt"))
def test_pickled_weights_are_refused_with_the_way_out(llama_base: Path, tmp_path: Path, name: str) -> None:
    (llama_base / SINGLE_FILE).unlink()
    (llama_base / name).write_bytes(pickle.dumps(Planted(tmp_path / "it-ran")))
    assert refused(llama_base) == Problem("weights-pickled", llama_base, file=name)
    assert not (tmp_path / "it-ran").exists()
