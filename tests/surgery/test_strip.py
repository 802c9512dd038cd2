"""strip(expand(x)) == x, every file byte for byte; a folder that cannot give the base back gives nothing."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from scale_surgery.errors import CheckpointError
from scale_surgery.planning.request import Request
from scale_surgery.surgery.expand import expand
from scale_surgery.surgery.strip import strip
from tests.conftest import digests

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


@pytest.fixture(params=("llama_base", "sharded_base"))
def furnished(request) -> Path:
    """A base model with every kind of side file, and a config.json that no program would write so."""
    base: Path = request.getfixturevalue(request.param)
    for name, content in EXTRAS.items():
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_bytes(content)
    config = json.loads((base / "config.json").read_text())
    config["rms_norm_eps"] = 1e-6
    text = json.dumps(config, indent="\t", sort_keys=False).replace("\n", "\r\n").replace("1e-06", "1e-6")
    assert "1e-6" in text
    (base / "config.json").write_bytes(text.encode())
    return base


@pytest.mark.parametrize("how", ("auto", "copy", "link"))
def test_every_file_comes_back_byte_for_byte(furnished, tmp_path, how):
    before = digests(furnished)
    expanded = expand(furnished, Request("0-1", variant="adapt"), tmp_path / "expanded", base_weights=how).path
    assert digests(furnished) == before
    stripped = strip(expanded, tmp_path / "stripped", base_weights=how)
    assert digests(tmp_path / "stripped") == before
    assert stripped.files == before
    assert stripped.base_name == furnished.name
    assert stripped.left_out == ()
    # and side files were taken along under their own names
    found = digests(expanded)
    assert {name: found[name] for name in EXTRAS} == {name: before[name] for name in EXTRAS}
    assert json.loads((expanded / "config.json").read_text())["rms_norm_eps"] == 1e-6


def test_a_single_file_comes_back_under_its_old_name(llama_base, tmp_path):
    expanded = expand(llama_base, Request("0"), tmp_path / "expanded").path
    assert not (expanded / "model.safetensors").exists(), "a loader would take it before the index"
    assert (expanded / "model-00001-of-00001.safetensors").is_file()
    strip(expanded, tmp_path / "stripped")
    assert (tmp_path / "stripped" / "model.safetensors").is_file()
    assert not (tmp_path / "stripped" / "model.safetensors.index.json").exists()


def test_weights_in_other_formats_are_left_out_and_named(llama_base, tmp_path):
    before = digests(llama_base)
    for name in ("pytorch_model.bin", "model.gguf", "onnx/model.onnx", "consolidated.safetensors"):
        (llama_base / name).parent.mkdir(exist_ok=True)
        (llama_base / name).write_bytes(b"x" * 100)
    expansion = expand(llama_base, Request("0"), tmp_path / "expanded")
    left_out = ("model.gguf", "onnx/model.onnx", "pytorch_model.bin", "consolidated.safetensors")
    assert set(expansion.left_out) == set(left_out)
    assert not set(left_out) & set(digests(expansion.path))
    stripped = strip(expansion.path, tmp_path / "stripped")
    assert set(stripped.left_out) == set(left_out)
    assert digests(tmp_path / "stripped") == before


def test_an_altered_base_shard_gives_nothing_and_is_named(pair_of, tmp_path):
    expanded = Path(shutil.copytree(pair_of("llama", tied=True).path, tmp_path / "expanded"))
    shard = sorted(expanded.glob("model-*.safetensors"))[1]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    (expanded / "generation_config.json").write_text("{}")
    with pytest.raises(CheckpointError) as error:
        strip(expanded, tmp_path / "stripped")
    lines = str(error.value).splitlines()
    assert {line.split(":")[0] for line in lines} == {shard.name, "generation_config.json"}
    assert all("expected" in line and "The file was changed after the expansion" in line for line in lines)
    assert not (tmp_path / "stripped").exists()


def test_a_changed_copy_of_the_base_config_is_noticed(pair_of, tmp_path):
    expanded = Path(shutil.copytree(pair_of("llama").path, tmp_path / "expanded"))
    manifest = json.loads((expanded / "surgery.json").read_text())
    manifest["replaced"]["config.json"] += " "
    (expanded / "surgery.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"^config\.json: sha256 .* expected .* from surgery\.json"):
        strip(expanded, tmp_path / "stripped")


def test_missing_files_are_all_named_before_anything_is_written(pair_of, tmp_path):
    expanded = Path(shutil.copytree(pair_of("llama").path, tmp_path / "expanded"))
    (expanded / "model-00001-of-00001.safetensors").unlink()
    (expanded / "generation_config.json").unlink()
    with pytest.raises(CheckpointError) as error:
        strip(expanded, tmp_path / "stripped")
    assert "model-00001-of-00001.safetensors: not found in" in str(error.value)
    assert "it holds the base's model.safetensors. Restore it from where you got it." in str(error.value)
    assert "generation_config.json: not found in" in str(error.value)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["expanded"]


def test_what_is_not_expanded_cannot_be_stripped(base_of, tmp_path):
    with pytest.raises(CheckpointError, match=r"is a base model, expected one made by scale-surgery expand"):
        strip(base_of("llama"), tmp_path / "stripped")
    with pytest.raises(CheckpointError, match=r"nowhere: not found\. Give a model folder\."):
        strip(tmp_path / "nowhere", tmp_path / "stripped")


def test_a_manifest_of_another_format_or_incomplete_is_refused(pair_of, tmp_path):
    expanded = Path(shutil.copytree(pair_of("llama").path, tmp_path / "expanded"))
    manifest = json.loads((expanded / "surgery.json").read_text())
    (expanded / "surgery.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(CheckpointError, match=r"surgery\.json: format 99, expected 3\. Use the release that made it"):
        strip(expanded, tmp_path / "stripped")
    del manifest["base_files"]
    (expanded / "surgery.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"surgery\.json: is incomplete \(base_files is missing\)\. Restore it"):
        strip(expanded, tmp_path / "stripped")


@pytest.mark.parametrize("name", ("../outside.txt", "/tmp/outside.txt"))
def test_a_manifest_cannot_write_outside_the_folder(pair_of, tmp_path, name):
    """surgery.json may come from anybody: its names are paths inside the folder, or nothing is written."""
    expanded = Path(shutil.copytree(pair_of("llama").path, tmp_path / "expanded"))
    manifest = json.loads((expanded / "surgery.json").read_text())
    name = name.replace("/tmp", str(tmp_path))
    entry = manifest["base_files"]["config.json"]
    for stored_as in (None, name):
        manifest["base_files"][name if stored_as is None else "inside.txt"] = entry | {"stored_as": stored_as}
        manifest["replaced"][name] = "boo"
        (expanded / "surgery.json").write_text(json.dumps(manifest))
        with pytest.raises(
            CheckpointError, match=r"outside\.txt' is said to be a file of the model, expected a name in"
        ):
            strip(expanded, tmp_path / "out" / "stripped")
        assert not list(tmp_path.rglob("outside.txt"))
        del manifest["base_files"][name if stored_as is None else "inside.txt"]
    del manifest["replaced"]["config.json"]
    (expanded / "surgery.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"is incomplete, the text of config\.json is missing"):
        strip(expanded, tmp_path / "out" / "stripped")


def test_hard_links_share_the_file_and_are_released_again(llama_base, tmp_path):
    weights = llama_base / "model.safetensors"
    expanded = expand(llama_base, Request("0"), tmp_path / "expanded", base_weights="link")
    assert expanded.base_bytes_written == 0
    linked = expanded.path / "model-00001-of-00001.safetensors"
    assert linked.stat().st_ino == weights.stat().st_ino
    assert weights.stat().st_nlink == 2
    strip(expanded.path, tmp_path / "stripped", base_weights="link")
    assert (tmp_path / "stripped" / "model.safetensors").stat().st_ino == weights.stat().st_ino
    assert weights.stat().st_nlink == 3
    shutil.rmtree(expanded.path)
    shutil.rmtree(tmp_path / "stripped")
    assert weights.stat().st_nlink == 1
    # what programs may edit in place is never shared
    assert (llama_base / "config.json").stat().st_nlink == 1


@pytest.mark.parametrize("how", ("auto", "copy"))
def test_copies_do_not_share_the_file(llama_base, tmp_path, how):
    expanded = expand(llama_base, Request("0"), tmp_path / "expanded", base_weights=how)
    assert expanded.base_bytes_written == (llama_base / "model.safetensors").stat().st_size
    assert (llama_base / "model.safetensors").stat().st_nlink == 1
    (expanded.path / "model-00001-of-00001.safetensors").write_bytes(b"")
    assert (llama_base / "model.safetensors").stat().st_size > 0


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
