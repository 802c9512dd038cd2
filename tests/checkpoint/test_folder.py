"""Reading checkpoints: what headers and index say, and for what folders are refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scale_surgery.checkpoint.files import finished_file
from scale_surgery.checkpoint.folder import open_checkpoint, read_chunks, read_json, read_tensor
from scale_surgery.checkpoint.listing import list_files
from scale_surgery.checkpoint.names import INDEX_FILE
from scale_surgery.errors import CheckpointError, Problem
from tests.conftest import edited, problems, refused


def problem(path: Path) -> Problem:
    """The one problem for which a folder is refused."""
    (only,) = problems(open_checkpoint, path, error=CheckpointError)
    return only


@pytest.mark.parametrize(("tied", "dtype"), ((False, "float32"), (True, "bfloat16")))
def test_headers_say_what_safetensors_reads(base_of, tied, dtype):
    folder = base_of("llama", dtype, tied)
    checkpoint = open_checkpoint(folder)
    assert len(checkpoint.shards) > 1 if tied else checkpoint.shards == ("model.safetensors",)
    assert checkpoint.dtype == {"float32": "F32", "bfloat16": "BF16"}[dtype]
    assert checkpoint.config["model_type"] == "llama"
    assert checkpoint.recorded is None
    wanted = {name: value for shard in checkpoint.shards for name, value in load_file(folder / shard).items()}
    assert set(wanted) == set(checkpoint.tensors)
    for name, value in wanted.items():
        info = checkpoint.tensors[name]
        assert info.shape == tuple(value.shape)
        assert torch.equal(read_tensor(checkpoint, name), value)
        raw = b"".join(read_chunks(folder / info.file, info.offset, info.bytes))
        assert raw == value.view(torch.uint8).numpy().tobytes()
        assert info.elements == value.numel()


def test_folders_that_are_no_models(tmp_path):
    assert problem(tmp_path / "no") == Problem("folder-missing", tmp_path / "no")
    assert problem(tmp_path) == Problem("folder-empty", tmp_path)
    (tmp_path / "file").write_text("x")
    assert problem(tmp_path / "file") == Problem("folder-is-file", tmp_path / "file")
    assert problem(tmp_path) == Problem("json-missing", tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{}")
    assert problem(tmp_path) == Problem("weights-missing", tmp_path)


@pytest.mark.parametrize("files", (["model-q8.gguf"], ["config.json", "mmproj-model.gguf", "sub/Model.GGUF"]))
def test_a_folder_of_gguf_is_told_how_it_becomes_safetensors(tmp_path, files):
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text('{"model_type": "llama"}')
    load = f"from_pretrained({str(tmp_path)!r}, gguf_file={files[-1]!r}"
    assert problem(tmp_path) == Problem("folder-gguf", tmp_path, file=files[-1], load=load)
    file = tmp_path / files[-1]
    load = f"from_pretrained({str(file.parent)!r}, gguf_file={file.name!r}"
    assert problem(file) == Problem("folder-is-gguf", file, load=load)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    (tmp_path / "config.json").write_text("{}")
    wanted = Problem("weights-pickled", tmp_path, file="pytorch_model.bin")
    assert problem(tmp_path) == wanted, "transformers would read those"


def test_json_in_a_folder_of_that_name(tmp_path):
    (tmp_path / "config.json").mkdir()
    with refused("json-unreadable", tmp_path / "config.json", CheckpointError):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("content", "code", "values"),
    (
        (b"", "header-length", {"length": 0, "size": 0}),
        (b"short", "header-length", {"length": int.from_bytes(b"short", "little"), "size": 5}),
        ((13).to_bytes(8, "little") + b'{"a":{"x":1}}', "header-invalid", {"error": "'data_offsets'"}),
    ),
)
def test_a_shard_that_is_not_safetensors(llama_base, content, code, values):
    (llama_base / "model.safetensors").write_bytes(content)
    assert problem(llama_base) == Problem(code, "model.safetensors", **values)


def test_a_header_that_is_no_json(llama_base):
    (llama_base / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"{no}")
    with refused("header-invalid", "model.safetensors"):
        open_checkpoint(llama_base)


def test_a_truncated_shard_names_the_tensor_and_the_bytes(llama_base):
    shard = llama_base / "model.safetensors"
    size, last = shard.stat().st_size, max(open_checkpoint(llama_base).tensors.values(), key=lambda info: info.offset)
    os.truncate(shard, size - 1)
    wanted = Problem("tensor-past-end", "model.safetensors", tensor=last.name, end=size, size=size - 1)
    assert problem(llama_base) == wanted


def test_missing_and_damaged_shards_are_all_named(sharded_base):
    first, second, *_ = sorted(file.name for file in sharded_base.glob("*.safetensors"))
    (sharded_base / first).unlink()
    (sharded_base / second).write_bytes(b"x")
    assert problems(open_checkpoint, sharded_base, error=CheckpointError) == [
        Problem("shard-missing", first, folder=sharded_base),
        Problem("header-length", second, length=ord("x"), size=1),
    ]


def test_what_another_process_is_writing_is_no_part_of_a_checkpoint(llama_base):
    before = open_checkpoint(llama_base)
    with finished_file(llama_base / "surgery.json") as temporary:
        temporary.write_text("half")
        assert open_checkpoint(llama_base) == before
        assert "surgery.json" not in " ".join(list_files(llama_base))


def test_index_and_shards_that_disagree(sharded_base):
    shards = sorted(file.name for file in sharded_base.glob("*.safetensors"))
    where = json.loads((sharded_base / INDEX_FILE).read_text())["weight_map"]
    moved, dropped = "model.norm.weight", "model.embed_tokens.weight"
    wrong_shard = next(shard for shard in shards if shard != where[moved])

    with edited(sharded_base / INDEX_FILE) as index:
        index["weight_map"] |= {moved: wrong_shard, "model.ghost.weight": shards[0]}
        del index["weight_map"][dropped]
    assert problems(open_checkpoint, sharded_base) == [
        Problem("index-wrong-shard", INDEX_FILE, tensor=moved, declared=wrong_shard, shard=where[moved]),
        Problem("index-no-shard", INDEX_FILE, tensor="model.ghost.weight", declared=shards[0]),
        Problem("index-unlisted", INDEX_FILE, tensor=dropped, shard=where[dropped]),
    ]


def test_a_tensor_stored_twice(sharded_base):
    first, second, *_ = sorted(sharded_base.glob("*.safetensors"))
    name, value = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: value}, second)
    assert problem(sharded_base) == Problem("tensor-stored-twice", name, first=first.name, second=second.name)


def test_classes_that_are_no_object(llama_base):
    with edited(llama_base / "config.json") as config:
        config["auto_map"] = ["x"]
    assert problem(llama_base) == Problem("config-auto-map", f"{llama_base}/config.json: auto_map", value=["x"])


def test_a_folder_that_may_not_be_listed(llama_base, monkeypatch):
    """Its files would be missing from every copy, without a word."""
    (llama_base / "extra").mkdir()
    scan = os.scandir

    def closed(path):
        if os.fspath(path).endswith("extra"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", closed)
    assert problem(llama_base) == Problem("folder-unlistable", llama_base / "extra", error="Permission denied")


def test_an_index_without_a_weight_map(sharded_base):
    for content in ("{}", '{"weight_map": []}', '{"weight_map": {}}'):
        (sharded_base / INDEX_FILE).write_text(content)
        assert problem(sharded_base) == Problem("index-without-map", INDEX_FILE)


def test_a_single_file_wins_over_an_index_as_in_transformers(llama_base, sharded_base):
    shutil.copy(sharded_base / INDEX_FILE, llama_base)
    checkpoint = open_checkpoint(llama_base)
    assert checkpoint.shards == ("model.safetensors",)
    assert INDEX_FILE in checkpoint.side_files


def test_which_files_belong(llama_base):
    (llama_base / ".git").mkdir()
    os.mkfifo(llama_base / ".git" / "daemon")
    for name in (".git/HEAD", ".cache/huggingface/x", "__pycache__/a.pyc", "deep/.git/x", "sub/ok.txt", "m.gguf"):
        (llama_base / name).parent.mkdir(parents=True, exist_ok=True)
        (llama_base / name).write_text("x")
    assert list_files(llama_base) == [
        "config.json",
        "generation_config.json",
        "m.gguf",
        "model.safetensors",
        "sub/ok.txt",
    ]
    checkpoint = open_checkpoint(llama_base)
    assert checkpoint.side_files == ("config.json", "generation_config.json", "sub/ok.txt")
    assert checkpoint.left_out == ("m.gguf",)
