"""Folders that version 0.1.0 wrote are verified, trained, merged, applied and stripped by today's code."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

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
from tests.each import mostly

ARCHIVE = Path(__file__).parents[1] / "data" / "release-0.1.0.tar.gz"
EXPANDED = ("expanded", "trained", "routed", "grown", "deepened")
SETTINGS = TrainingSettings(steps=2, sequence_length=16, batch_size=2, log_every=1)
IDS = torch.tensor([[1, 5, 6, 7, 8, 9]])
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders, to be read only."""
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder / ARCHIVE.name.removesuffix(".tar.gz")


@pytest.fixture
def old(kept: Path, tmp_path: Path) -> Path:
    """A copy of the folders, to be damaged by a test; verify writes its result into them, too."""
    return Path(shutil.copytree(kept, tmp_path / "old"))


def unrecorded(path: Path) -> dict[str, str]:
    """sha256 of every file but surgery.json, into which `verify` wrote when the folders were made."""
    return {name: digest for name, digest in digests(path).items() if name != "surgery.json"}


@pytest.mark.parametrize("name", (*EXPANDED, "fused"))
def test_it_verifies(old, name):
    found = verify(old / name, base=old / "base")
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
    assert not verify(old / name, probes=None).passed


@pytest.mark.parametrize("name", (*EXPANDED, "fused"))
def test_strip_gives_every_file_of_the_base_back(kept, tmp_path, name):
    assert digests(strip(kept / name, tmp_path / "base").path) == digests(kept / "base")


@pytest.mark.parametrize("name", mostly(("expanded", "trained", "grown", "deepened"), "trained".__ne__))
def test_it_trains_on(kept, tmp_path, name):
    done = train(kept / name, [kept / "new.txt"], tmp_path / "out", SETTINGS)
    assert verify(done.path).passed
    assert done.trained_parameters > 0
    assert digests(strip(done.path, tmp_path / "base").path) == digests(kept / "base")


def test_it_routes_and_unroutes(kept, tmp_path):
    routed = route_export(kept / "trained", tmp_path / "routed", Routing()).path
    wanted, found = load(kept / "routed"), load(routed)
    assert torch.equal(wanted(IDS).logits, found(IDS).logits)
    again = unroute(kept / "routed", tmp_path / "again").path
    assert unrecorded(again) == unrecorded(kept / "trained")


def test_it_merges_and_comes_apart(kept, tmp_path):
    assert merge(kept / "trained", tmp_path / "fused").drift.holds
    assert unrecorded(merge(kept / "fused", tmp_path / "blocks", "blocks").path) == unrecorded(kept / "trained")
    assert merge(kept / "grown", tmp_path / "stock", "stock").drift.holds


def test_an_extract_goes_back_on_its_base(kept, tmp_path):
    apply(kept / "extract", tmp_path / "applied", base=kept / "base")
    assert unrecorded(tmp_path / "applied") == unrecorded(kept / "trained")
    assert digests(extract(kept / "trained", tmp_path / "extract").path) == digests(kept / "extract")
    model = load_expansion(load(kept / "base"), kept / "extract")
    assert torch.equal(model(IDS).logits, load(kept / "trained")(IDS).logits)


def test_a_saved_plan_is_executed_to_the_same_tensors(kept, tmp_path):
    done = expand(kept / "base", load_plan(kept / "base", kept / "plan.json"), tmp_path / "out")
    assert done.plan.request == Request("1-2", variant="preserve")
    for shard in done.plan.shards:
        ours, theirs = load_file(done.path / shard), load_file(kept / "expanded" / shard)
        assert list(ours) == list(theirs)
        for name, tensor in ours.items():
            # decomposed again, maybe on another processor
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", (*EXPANDED, "fused"))
def test_it_is_inspected_evaluated_and_reported(kept, name):
    assert inspect(kept / name).expansion is not None
    scores = evaluate(kept / name, new=kept / "new.txt").scores
    assert all(score.new is not None for score in scores)
    if name not in ("fused",):
        assert report(kept / name).tensors
