"""extract: the expansion alone, every file as it was, the base named; no loader takes it for a whole model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import transformers

from scale_surgery.checkpoint.folder import read_json
from scale_surgery.checkpoint.headers import read_header
from scale_surgery.errors import CheckpointError
from scale_surgery.evidence.evaluate import evaluate
from scale_surgery.evidence.inspect import inspect
from scale_surgery.folder.extract_folder import STORED_INDEX, open_extract
from scale_surgery.folder.record import read_manifest
from scale_surgery.modeling.expanded_routers import PosteriorRouter
from scale_surgery.planning.request import Request
from scale_surgery.surgery.expand import expand
from scale_surgery.surgery.extract import extract
from scale_surgery.surgery.merge import merge
from scale_surgery.surgery.route import route_export, set_routing
from scale_surgery.surgery.strip import strip
from tests.command import run
from tests.conftest import digests, name_base, refused

BASE_FILES = {"model-00001-of-00001.safetensors", "generation_config.json"}


@pytest.fixture
def expanded(pair_of, tmp_path) -> Path:
    """A copy of the tiny expanded llama, to be changed by a test."""
    return Path(shutil.copytree(pair_of("llama", "adapt").path, tmp_path / "expanded"))


@pytest.fixture(scope="module")
def ready(pair_of, tmp_path_factory) -> Path:
    """An extract that no test changes."""
    return extract(pair_of("llama", "adapt").path, tmp_path_factory.mktemp("extracts") / "extract").path


def test_it_holds_every_file_but_the_base_s_and_names_that(expanded, tmp_path):
    name_base(expanded, "org/base", "0123abc")
    before, path = digests(expanded), tmp_path / "extract"
    done = extract(expanded, path)
    assert digests(expanded) == before
    hashes = digests(path)
    del hashes["extract.json"]
    expected = {name: digest for name, digest in before.items() if name not in BASE_FILES}
    expected[STORED_INDEX] = expected.pop("model.safetensors.index.json")
    assert hashes == expected
    manifest, opened = read_manifest(expanded), open_extract(path)
    names = {name for shard in path.glob("*.safetensors") for name in read_header(path, shard.name)}
    assert names == set(opened.tensors) == {tensor.name for tensor in manifest.plan.tensors}
    assert opened.manifest == manifest
    assert (done.path, done.tensors, set(done.files)) == (path, len(names), set(before) - BASE_FILES)
    assert done.bytes == sum((path / name).stat().st_size for name in hashes)
    assert done.base_bytes == sum((expanded / name).stat().st_size for name in BASE_FILES)
    assert (done.licences, done.left_out) == ((), ())
    content = read_json(path / "extract.json")
    assert done.base_name == content["base_name"] == "org/base"
    assert done.base_revision == content["base_revision"] == "0123abc"
    assert set(content["from_base"]) == BASE_FILES


def test_licences_go_along_and_states_of_training_stay(llama_base, tmp_path):
    for name in ("LICENSE", "Notice.txt", "USE_POLICY.md", "README.md", "helper.py"):
        (llama_base / name).write_text(f"the {name}")
    source = expand(llama_base, Request("0"), tmp_path / "expanded").path
    log, state = source / "training" / "log.jsonl", source / "training" / "checkpoint-7" / "trainer_state.json"
    state.parent.mkdir(parents=True)
    log.write_text("{}\n")
    state.write_text("{}")
    (source / "training" / "checkpoint-7" / "optimizer.pt").write_bytes(b"state")
    (source / "NOTES.md").write_text("of the expansion")
    done = extract(source, tmp_path / "extract")
    assert set(done.licences) == {"LICENSE", "Notice.txt", "USE_POLICY.md"}
    assert set(done.left_out) == {"training/checkpoint-7/trainer_state.json", "training/checkpoint-7/optimizer.pt"}
    hashes = digests(tmp_path / "extract")
    assert {"training/log.jsonl", "LICENSE", "NOTES.md"} <= set(hashes)
    assert not {"helper.py", "training/checkpoint-7/trainer_state.json"} & set(hashes)


def test_no_loader_takes_it_for_a_whole_model(ready, pair_of):
    for options in ({}, {"trust_remote_code": True}):
        for auto_class in (transformers.AutoModel, transformers.AutoModelForCausalLM):
            with pytest.raises(OSError, match=r"model\.safetensors") as error:
                auto_class.from_pretrained(ready, **options)
            assert str(error.value).splitlines()[-1].startswith("A folder with extract.json in place of weights is an")
            assert "scale-surgery apply EXTRACT --base BASE -o FOLDER" in str(error.value)
    peft = pytest.importorskip("peft")
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        peft.PeftModel.from_pretrained(pair_of("llama", "adapt").base, ready)


def test_commands_say_what_it_is(ready, tmp_path):
    """Each way of opening a folder: as a model, as an expanded one, to be routed, among others, as a base."""
    out = tmp_path / "out"
    for call in (
        lambda: inspect(ready),
        lambda: strip(ready, out),
        lambda: route_export(ready, out),
        lambda: set_routing(ready, PosteriorRouter()),
        lambda: evaluate([ready], [__file__], []),
        lambda: expand(ready, Request("0"), out),
    ):
        with refused("form-extract-not-expanded", ready, CheckpointError):
            call()
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_extracted_is_refused(expanded, tmp_path):
    """What is not as it was written: see `test_damaged.py`."""
    (expanded / STORED_INDEX).write_text("{}")
    with refused("extract-name-taken", expanded / STORED_INDEX, CheckpointError):
        extract(expanded, tmp_path / "extract")
    (expanded / STORED_INDEX).unlink()
    fused = merge(expanded, tmp_path / "fused").path
    with refused("form-fused-not-expanded", fused, CheckpointError):
        extract(fused, tmp_path / "extract")


def test_shards_can_be_links(expanded, tmp_path):
    extract(expanded, tmp_path / "extract")
    before = digests(tmp_path / "extract")
    extract(expanded, tmp_path / "extract", overwrite=True, base_weights="link")
    assert digests(tmp_path / "extract") == before
    name = "expansion-default-00001-of-00001.safetensors"
    assert (expanded / name).samefile(tmp_path / "extract" / name)
    assert not (expanded / "config.json").samefile(tmp_path / "extract" / "config.json")


def test_the_commands(expanded, base_of, tmp_path):
    made = run("extract", expanded, "-o", tmp_path / "extract", "--json")
    assert json.loads(made.stdout)["base_name"] == base_of("llama").name
    applied = run("apply", tmp_path / "extract", "--base", base_of("llama"), "-o", tmp_path / "a")
    assert "all equal" in applied.stdout
    assert digests(tmp_path / "a") == digests(expanded)
    failed = run("apply", tmp_path / "extract", "--base", expanded, "-o", tmp_path / "b", code=1)
    assert failed.stderr.startswith("error: ")
