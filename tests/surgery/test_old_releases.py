"""Folders that version 0.1.0 wrote are verified, trained, merged, applied and stripped by today's code."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from scale_surgery import (
    Request,
    Routing,
    TrainingSettings,
    apply,
    evaluate,
    expand,
    extract,
    inspect,
    load_expansion,
    load_plan,
    merge,
    report,
    route_export,
    strip,
    train,
    unroute,
    verify,
)
from scale_surgery.checkpoint.folder import open_checkpoint
from tests.conftest import digests, load

OLD = Path(__file__).parents[1] / "data" / "release-0.1.0"
BASE, NEW = OLD / "base", OLD / "new.txt"
EXPANDED = ("expanded", "trained", "routed", "grown", "deepened")
SETTINGS = TrainingSettings(steps=2, sequence_length=16, batch_size=2, log_every=1)
IDS = torch.tensor([[1, 5, 6, 7, 8, 9]])


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A copy of the folders, since verify writes its result into them."""
    return Path(shutil.copytree(OLD, tmp_path / "old"))


def unrecorded(path: Path) -> dict[str, str]:
    """sha256 of every file but surgery.json, into which `verify` wrote when the folders were made."""
    return {name: digest for name, digest in digests(path).items() if name != "surgery.json"}


@pytest.mark.parametrize("name", (*EXPANDED, "fused"))
def test_it_verifies(old, name):
    found = verify(old / name, base=BASE)
    assert found.passed, found
    assert found.numbers is not None
    assert not found.warnings


@pytest.mark.parametrize("name", (*EXPANDED, "fused"))
def test_one_changed_base_byte_is_found(old, name):
    found = open_checkpoint(old / name).tensors["model.embed_tokens.weight"]
    shard = old / name / found.file
    content = bytearray(shard.read_bytes())
    content[found.offset] ^= 1
    shard.write_bytes(content)
    assert not verify(old / name, files_only=True).passed


@pytest.mark.parametrize("name", (*EXPANDED, "fused"))
def test_strip_gives_every_file_of_the_base_back(tmp_path, name):
    assert digests(strip(OLD / name, tmp_path / "base").path) == digests(BASE)


@pytest.mark.parametrize("name", ("expanded", "trained", "grown", "deepened"))
def test_it_trains_on(tmp_path, name):
    done = train(OLD / name, [NEW], tmp_path / "out", SETTINGS)
    assert verify(done.path).passed
    assert done.trained_parameters > 0
    assert digests(strip(done.path, tmp_path / "base").path) == digests(BASE)


def test_it_routes_and_unroutes(tmp_path):
    routed = route_export(OLD / "trained", tmp_path / "routed", Routing()).path
    wanted, found = load(OLD / "routed"), load(routed)
    assert torch.equal(wanted(IDS).logits, found(IDS).logits)
    again = unroute(OLD / "routed", tmp_path / "again").path
    assert unrecorded(again) == unrecorded(OLD / "trained")


def test_it_merges_and_comes_apart(tmp_path):
    assert merge(OLD / "trained", tmp_path / "fused").drift.holds
    assert unrecorded(merge(OLD / "fused", tmp_path / "blocks", "blocks").path) == unrecorded(OLD / "trained")
    assert merge(OLD / "grown", tmp_path / "stock", "stock").drift.holds


def test_an_extract_goes_back_on_its_base(tmp_path):
    apply(OLD / "extract", tmp_path / "applied", base=BASE)
    assert unrecorded(tmp_path / "applied") == unrecorded(OLD / "trained")
    assert digests(extract(OLD / "trained", tmp_path / "extract").path) == digests(OLD / "extract")
    model = load_expansion(load(BASE), OLD / "extract")
    assert torch.equal(model(IDS).logits, load(OLD / "trained")(IDS).logits)


def test_a_saved_plan_is_executed_to_the_same_tensors(tmp_path):
    done = expand(BASE, load_plan(BASE, OLD / "plan.json"), tmp_path / "out")
    assert done.plan.request == Request("1-2", variant="preserve")
    ours = digests(done.path)
    for shard in OLD.joinpath("expanded").glob("*.safetensors"):
        assert ours[shard.name] == digests(OLD / "expanded")[shard.name]


@pytest.mark.parametrize("name", (*EXPANDED, "fused"))
def test_it_is_inspected_evaluated_and_reported(name):
    assert inspect(OLD / name).expansion is not None
    scores = evaluate(OLD / name, new=NEW).scores
    assert all(score.new is not None for score in scores)
    if name not in ("fused",):
        assert report(OLD / name).tensors
