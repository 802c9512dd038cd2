"""What is promised of expansions holds on a real base, and each check notices a change of its tensors."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from scale_surgery import (
    Probes,
    Request,
    Verification,
    apply,
    expand,
    extract,
    inspect,
    merge,
    plan,
    route_export,
    strip,
    verify,
)
from tests.conftest import digests, refusal, shake
from tests.real.conftest import flipped

# the last layer is one of full attention, that before it has a window
REQUESTS = {
    "preserve": Request("16-17", up_width=256),
    "adapt": Request("16-17", variant="adapt", up_width=256),
    "gated": Request("16-17", variant="gated", up_width=256),
    "grow": Request("16-17", method="grow"),
    "depth": Request("16-17", method="depth"),
}


@pytest.fixture(scope="module")
def trained(gemma: Path, room: Path) -> Path:
    """An adapt expansion whose tensors are all changed, as by training."""
    return shake(expand(gemma, REQUESTS["adapt"], room / "trained", base_weights="link").path, by=0.01)


def run(folder: Path) -> Verification:
    """Verify a folder with a forward pass over the prompts, without continuations."""
    result = verify(folder, probes=Probes(max_new_tokens=0), record=False)
    assert result.numbers is not None and not result.problems
    return result


def base_shard(folder: Path) -> Path:
    """The shard of a folder that holds the base's tensors."""
    (shard,) = folder.glob("model*.safetensors")
    return shard


def test_inspect_and_plan(gemma: Path) -> None:
    found = inspect(gemma)
    assert (found.family, found.tensors, found.sizes.layers, found.sizes.is_tied) == ("gemma3_text", 236, 18, True)
    assert found.treatments == {"treatment": "self_attn split, mlp split"}
    assert found.quantisation is None and not found.not_loaded and not found.remarks
    assert plan(gemma, Request("last:4")).layers == (14, 15, 16, 17)


@pytest.mark.parametrize("name", REQUESTS)
def test_an_expansion_is_its_base_until_trained_and_gives_it_back(name: str, gemma: Path, room: Path) -> None:
    folder = expand(gemma, REQUESTS[name], room / name, base_weights="link").path
    initial = run(folder)
    assert initial.passed and initial.state == "initial" and initial.numbers.is_bit_equal
    changed = run(shake(folder, by=0.01))
    assert changed.passed and changed.state == "trained" and changed.trained_tensors
    # the negative control: changed tensors change the output. In preserve the base's stream is still the base's
    assert not changed.numbers.is_bit_equal and changed.numbers.drift > 0.1
    assert changed.numbers.base_logits_bit_equal is (name == "preserve")
    strip(folder, room / "stripped", base_weights="link")
    assert digests(room / "stripped") == digests(gemma)
    shutil.rmtree(room / "stripped")
    with flipped(base_shard(folder), room):
        assert not verify(folder, probes=None, record=False).passed
        assert refusal(strip, folder, room / "stripped").startswith("model.safetensors: sha256")
    assert not (room / "stripped").exists()
    shutil.rmtree(folder)


def test_a_fused_model_computes_the_same_and_is_taken_apart_again(trained: Path, room: Path) -> None:
    fused = room / "fused"
    drift = merge(trained, fused, probes=Probes(max_new_tokens=0)).drift
    assert drift is not None and drift.drift < 0.05 * drift.largest_logit and drift.top1_agreement > 0.95
    shard = max(fused.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    with flipped(shard, room):
        assert not verify(fused, probes=None, record=False).passed
    merge(fused, room / "blocks", to="blocks")
    assert digests(room / "blocks") == digests(trained)
    shutil.rmtree(fused)
    shutil.rmtree(room / "blocks")


def test_an_extract_is_applied_to_its_base_alone(trained: Path, gemma: Path, room: Path) -> None:
    alone, other = room / "extract", room / "other"
    extract(trained, alone, base_weights="link")
    assert sum(file.stat().st_size for file in alone.rglob("*")) < 200e6
    apply(alone, room / "applied", gemma, base_weights="link")
    assert digests(room / "applied") == digests(trained)
    shutil.copytree(gemma, other)
    with flipped(base_shard(other), room):
        assert "1 of 236 tensors" in refusal(apply, alone, room / "wrong", other)
    for folder in (alone, other, room / "applied"):
        shutil.rmtree(folder)


def test_a_second_expansion_and_the_first_are_each_as_alone(trained: Path, room: Path) -> None:
    second = Request("17", variant="adapt", up_width=256, name="second")
    folder = expand(trained, second, room / "second", base_weights="link").path
    result = run(folder)
    assert result.passed and result.expansions == ("default", "second")
    assert [path.name for path in result.numbers.paths] == ["base", "default", "second"]
    assert all(path.is_bit_equal for path in result.numbers.paths)
    # the negative control: the paths are not all alike
    assert not result.numbers.is_bit_equal
    shutil.rmtree(folder)


def test_a_routed_model_holds_its_base_and_its_expansion(trained: Path, room: Path) -> None:
    folder = route_export(trained, room / "routed", base_weights="link").path
    result = run(folder)
    assert result.passed and all(path.is_bit_equal for path in result.numbers.paths)
    assert result.numbers.mixture is not None and result.numbers.mixture.excess < 1
    assert not result.numbers.is_bit_equal
    with flipped(base_shard(folder), room):
        assert not verify(folder, probes=None, record=False).passed
    shutil.rmtree(folder)
