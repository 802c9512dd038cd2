"""Reading checkpoints: what headers and index say, and what is said of folders that are no good."""

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
from scale_surgery.errors import CheckpointError
from tests.conftest import edited


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(path)
    return str(error.value)


@pytest.mark.parametrize(("tied", "dtype"), ((False, "float32"), (True, "bfloat16")))
def test_headers_say_what_safetensors_reads(base_of, tied, dtype):
    folder = base_of("llama", dtype, tied)
    checkpoint = open_checkpoint(folder)
    assert len(checkpoint.shards) > 1 if tied else checkpoint.shards == ("model.safetensors",)
    assert checkpoint.dtype == {"float32": "F32", "bfloat16": "BF16"}[dtype]
    assert checkpoint.config["model_type"] == "llama"
    assert checkpoint.manifest is None
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
    problem = refusal(tmp_path / "no")
    assert problem.startswith(f"{tmp_path}/no: not found. Give a model folder. What lies on the Hub is fetched first: ")
    assert refusal(tmp_path) == f"{tmp_path}: the folder is empty, expected config.json and safetensors weights."
    (tmp_path / "file").write_text("x")
    assert refusal(tmp_path / "file") == f"{tmp_path}/file: is a file, expected a model folder."
    assert refusal(tmp_path) == f"{tmp_path}/config.json: not found. Is this a model folder?"
    (tmp_path / "config.json").write_text("{}")
    wanted = "no weights, expected model.safetensors or model.safetensors.index.json."
    assert refusal(tmp_path) == f"{tmp_path}: {wanted}"


@pytest.mark.parametrize("files", (["model-q8.gguf"], ["config.json", "mmproj-model.gguf", "sub/Model.GGUF"]))
def test_a_folder_of_gguf_is_told_how_it_becomes_safetensors(tmp_path, files):
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text('{"model_type": "llama"}')
    given = f"from_pretrained({str(tmp_path)!r}, gguf_file={files[-1]!r}"
    advice = (
        "Convert it once in Python, after pip install gguf: "
        f"AutoModelForCausalLM.{given}, quantization_config=GgufConfig(dequantize=True)).save_pretrained(NEW); "
        f"AutoTokenizer.{given}).save_pretrained(NEW)."
    )
    assert refusal(tmp_path) == f"{tmp_path}: holds weights as GGUF ({files[-1]}), expected safetensors. {advice}"
    file = tmp_path / files[-1]
    given = given.replace(str(tmp_path), str(file.parent)).replace(files[-1], file.name)
    problem = refusal(file)
    assert (
        problem.startswith(f"{file}: is a file, expected a model folder. Convert it once in Python")
        and given in problem
    )
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    (tmp_path / "config.json").write_text("{}")
    assert "found only pickled weights" in refusal(tmp_path), "transformers would read those"


def test_json_in_a_folder_of_that_name(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json: not readable as JSON"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("content", "message"),
    (
        (b"", "its first 8 bytes promise a header of 0 bytes in a file of 0 bytes. It is truncated or not a safe"),
        (b"short", "in a file of 5 bytes. It is truncated or not a safetensors file: download it again"),
        ((4).to_bytes(8, "little") + b"{no}", "its header is not that of a safetensors file"),
        (
            (13).to_bytes(8, "little") + b'{"a":{"x":1}}',
            "its header is not that of a safetensors file ('data_offsets')",
        ),
    ),
)
def test_a_shard_that_is_not_safetensors(llama_base, content, message):
    (llama_base / "model.safetensors").write_bytes(content)
    problem = refusal(llama_base)
    assert problem.startswith("model.safetensors: ")
    assert message in problem


def test_a_truncated_shard_names_the_tensor_and_the_bytes(llama_base):
    shard = llama_base / "model.safetensors"
    size, last = shard.stat().st_size, max(open_checkpoint(llama_base).tensors.values(), key=lambda info: info.offset)
    os.truncate(shard, size - 1)
    message = refusal(llama_base)
    assert f"ends at byte {size}, the file has {size - 1} bytes. It is truncated: download it again." in message
    assert last.name in message


def test_missing_and_damaged_shards_are_all_named(sharded_base):
    first, second, *_ = sorted(file.name for file in sharded_base.glob("*.safetensors"))
    (sharded_base / first).unlink()
    (sharded_base / second).write_bytes(b"x")
    lines = refusal(sharded_base).splitlines()
    assert lines[0] == f"{first}: shard not found in {sharded_base}. Download it again."
    assert lines[1].startswith(f"{second}: its first 8 bytes promise a header")
    assert len(lines) == 2


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
    assert set(refusal(sharded_base).splitlines()) == {
        f"{INDEX_FILE}: {moved} is said to lie in {wrong_shard}, found in {where[moved]}. Download it again.",
        f"{INDEX_FILE}: model.ghost.weight is said to lie in {shards[0]}, found in no shard. Download it again.",
        f"{INDEX_FILE}: {dropped} lies in {where[dropped]} but is not listed.",
    }


def test_a_tensor_stored_twice(sharded_base):
    first, second, *_ = sorted(sharded_base.glob("*.safetensors"))
    name, value = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: value}, second)
    assert f"{name}: stored in {first.name} and in {second.name}." in refusal(sharded_base)


def test_classes_that_are_no_object(llama_base):
    with edited(llama_base / "config.json") as config:
        config["auto_map"] = ["x"]
    wanted = "auto_map is ['x'], expected an object of classes. Restore it from where you got it."
    assert refusal(llama_base) == f"{llama_base}/config.json: {wanted}"


def test_a_folder_that_may_not_be_listed(llama_base, monkeypatch):
    """Its files would be missing from every copy, without a word."""
    (llama_base / "extra").mkdir()
    scan = os.scandir

    def closed(path):
        if os.fspath(path).endswith("extra"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", closed)
    assert refusal(llama_base) == (
        f"{llama_base}/extra: cannot be listed (Permission denied). Check its permissions, or take it out."
    )


def test_an_index_without_a_weight_map(sharded_base):
    for content in ("{}", '{"weight_map": []}', '{"weight_map": {}}'):
        (sharded_base / INDEX_FILE).write_text(content)
        assert refusal(sharded_base) == f"{INDEX_FILE}: has no weight_map, expected tensor names to shards."


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
