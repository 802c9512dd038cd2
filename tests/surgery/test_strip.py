"""strip(expand(x)) == x, every file byte for byte; a folder that cannot give the base back gives nothing."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from scale_surgery.errors import CheckpointError, Problem
from scale_surgery.planning.request import Request
from scale_surgery.surgery.expand import expand
from scale_surgery.surgery.strip import strip
from tests.conftest import digests, edited, problems, refused

SHARD, INDEX = "model-00001-of-00001.safetensors", "model.safetensors.index.json"
EXTRAS = {
    "README.md": b"---\nlicense: mit\n---\r\n# caf\xc3\xa9, no final newline",
    "LICENSE": b"anything\n",
    "chat_template.jinja": b"{{ messages }}\r\n",
    "tokenizer_extra.txt": b"",
    "odd_bytes.dat": bytes(range(256)),
    "helper.py": b"print('base code')\n",
    "notes/deep/er/file.txt": b"below",
    "onnx/config.json": b"{}",
}


@pytest.fixture
def numbered_base(sharded_base) -> Path:
    """A base of one numbered shard, whose name is the one that a single file gets."""
    tensors = {}
    for shard in sharded_base.glob("*.safetensors"):
        tensors |= load_file(shard)
        shard.unlink()
    save_file(tensors, sharded_base / SHARD)
    (sharded_base / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, SHARD)}))
    return sharded_base


@pytest.mark.parametrize(
    ("form", "how"),
    (("llama_base", "auto"), ("llama_base", "link"), ("sharded_base", "copy"), ("numbered_base", "link")),
)
def test_every_file_comes_back_byte_for_byte(request, tmp_path, form, how):
    """A base with every kind of side file, and a config.json that no program would write so."""
    base: Path = request.getfixturevalue(form)
    for name, content in EXTRAS.items():
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_bytes(content)
    config = json.loads((base / "config.json").read_text()) | {"rms_norm_eps": 1e-6}
    text = json.dumps(config, indent="\t", sort_keys=False).replace("\n", "\r\n").replace("1e-06", "1e-6")
    (base / "config.json").write_bytes(text.encode())
    before, shards = digests(base), sorted(base.glob("*.safetensors"))
    made = expand(base, Request("0-1", variant="adapt"), tmp_path / "expanded", base_weights=how)
    assert digests(base) == before
    assert not (made.path / "model.safetensors").exists(), "a loader would take it before the index"
    stripped = strip(made.path, tmp_path / "stripped", base_weights=how)
    assert digests(stripped.path) == stripped.files == before
    assert (stripped.base_name, stripped.left_out) == (base.name, ())
    # and side files were taken along under their own names
    hashes = digests(made.path)
    assert {name: hashes[name] for name in EXTRAS} == {name: before[name] for name in EXTRAS}
    assert json.loads((made.path / "config.json").read_text())["rms_norm_eps"] == 1e-6
    # shards are one file each with links, and copies without
    assert made.base_bytes_written == (0 if how == "link" else sum(file.stat().st_size for file in shards))
    assert {file.stat().st_nlink for file in shards} == {3 if how == "link" else 1}
    small = [folder / name for folder in (base, made.path, stripped.path) for name in ("config.json", "README.md")]
    assert {file.stat().st_nlink for file in small} == {1}, "what programs edit in place is never shared"
    shutil.rmtree(made.path)
    shutil.rmtree(stripped.path)
    assert {file.stat().st_nlink for file in base.rglob("*") if file.is_file()} == {1}, "links are released again"


def test_weights_in_other_formats_are_left_out_and_named(llama_base, tmp_path):
    before = digests(llama_base)
    left_out = {"pytorch_model.bin", "model.gguf", "onnx/model.onnx", "consolidated.safetensors"}
    left_out |= {"onnx/model.onnx_data", "rust_model.ot", "64.tflite"}
    for name in left_out:
        (llama_base / name).parent.mkdir(exist_ok=True)
        (llama_base / name).write_bytes(b"x" * 100)
    expansion = expand(llama_base, Request("0"), tmp_path / "expanded")
    stripped = strip(expansion.path, tmp_path / "stripped")
    assert set(expansion.left_out) == set(stripped.left_out) == left_out
    assert not left_out & set(digests(expansion.path))
    assert digests(stripped.path) == before


@pytest.fixture
def expanded(pair_of, tmp_path) -> Path:
    """A copy of an expanded folder, to be damaged by a test."""
    return Path(shutil.copytree(pair_of("llama").path, tmp_path / "expanded"))


def test_an_altered_shard_gives_nothing_until_it_is_mended(pair_of, expanded, tmp_path):
    whole = (expanded / SHARD).read_bytes()
    (expanded / SHARD).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    (expanded / "generation_config.json").write_text("{}")
    before, after = digests(pair_of("llama").base_path), digests(expanded)
    changed = {"model.safetensors": SHARD, "generation_config.json": "generation_config.json"}
    assert set(problems(strip, expanded, tmp_path / "stripped", error=CheckpointError)) == {
        Problem("base-not-given-back", name, sha256=after[stored], recorded=before[name])
        for name, stored in changed.items()
    }
    assert not (tmp_path / "stripped").exists()
    (expanded / SHARD).write_bytes(whole)
    shutil.copy(pair_of("llama").path / "generation_config.json", expanded)
    assert digests(strip(expanded, tmp_path / "stripped").path) == digests(pair_of("llama").base_path)


def test_missing_files_are_all_named_before_anything_is_written(expanded, tmp_path):
    (expanded / SHARD).unlink()
    (expanded / "generation_config.json").unlink()
    found = problems(strip, expanded, tmp_path / "stripped", error=CheckpointError)
    assert set(found) == {
        Problem("base-file-missing", SHARD, file="model.safetensors"),
        Problem("base-file-missing", "generation_config.json", file="generation_config.json"),
    }
    assert sorted(file.name for file in tmp_path.iterdir()) == ["expanded"]


def test_a_record_that_cannot_give_the_base_back_is_refused(expanded, tmp_path):
    replaced = json.loads((expanded / "surgery.json").read_text())["replaced"]
    kept = {INDEX: replaced[INDEX]} if INDEX in replaced else {}
    file = expanded / "surgery.json"
    for changes, code, where in (
        ({"replaced": replaced | {"config.json": replaced["config.json"] + " "}}, "base-not-given-back", "config.json"),
        ({"replaced": kept}, "record-incomplete", file),
        ({"format": 99}, "record-format", file),
    ):
        with edited(file) as record:
            record |= changes
        with refused(code, where, CheckpointError):
            strip(expanded, tmp_path / "stripped")
    assert not (tmp_path / "stripped").exists()


def test_what_is_not_there_cannot_be_stripped(tmp_path):
    with refused("folder-missing", tmp_path / "nowhere", CheckpointError):
        strip(tmp_path / "nowhere", tmp_path / "stripped")


@pytest.mark.parametrize("mask", (0o022, 0o077))
def test_permissions_follow_the_umask(llama_base, tmp_path, mask):
    (llama_base / "config.json").chmod(0o600)
    old = os.umask(mask)
    try:
        expanded = expand(llama_base, Request("0"), tmp_path / "expanded").path
        strip(expanded, tmp_path / "stripped")
    finally:
        os.umask(old)
    files = [file for folder in (expanded, tmp_path / "stripped") for file in folder.rglob("*") if file.is_file()]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o666 & ~mask}
