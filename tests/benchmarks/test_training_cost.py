"""The benchmark of training steps runs on a tiny shape, compares what it says, and its judgement can fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from benchmarks import training_cost
from benchmarks.training_cost import Cost, Settings

TINY = Settings(shape="tiny", batch=2, length=16, rounds=2, device="cpu", dtype="float32", threads=1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    training_cost.make_models(folder, TINY)
    return folder


def cost(variant: str, seconds: list[float], peak: int = 0) -> Cost:
    return Cost(variant, 1, seconds, [2 * second for second in seconds], peak)


def trained_names(model: torch.nn.Module) -> set[str]:
    return {name.rsplit(".", 1)[-1] for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_all_variants_are_measured_in_turns_and_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # processes of their own take seconds to start; the next test measures one peak
    monkeypatch.setattr(training_cost, "measure_peaks", lambda *_: dict.fromkeys(training_cost.VARIANTS, 1))
    output = tmp_path / "numbers.json"
    options = ["--shape", "tiny", "--batch", "2", "--length", "16", "--rounds", "2", "--threads", "1"]
    files = ["-o", str(output), "--markdown", str(tmp_path / "tables.md")]
    run = CliRunner().invoke(training_cost.main, [*options, *files], catch_exceptions=False)
    assert run.exit_code == 0, run.output
    lines = (tmp_path / "tables.md").read_text().splitlines()
    assert [line.split(" | ")[0] for line in lines[2:7]] == [f"| {variant}" for variant in training_cost.VARIANTS]
    report = json.loads(output.read_text())
    assert [entry["variant"] for entry in report["costs"]] == list(report["ratios"]) == list(training_cost.VARIANTS)
    for entry in report["costs"]:
        assert len(entry["seconds"]) == len(entry["processor_seconds"]) == 2
        assert min(entry["seconds"] + entry["processor_seconds"]) > 0
    assert set(report["ratios"]["preserve"].values()) == {1.0}
    assert not report["targets"]["full: more memory"], "equal memory is not less"


def test_peaks_see_optimizer_states_and_not_the_model(models: Path) -> None:
    model = training_cost.load(models, "full", "cpu")
    state = 2 * 4 * training_cost.count_trained(model)
    full, forward = (training_cost.measure_peak(models, variant, TINY) for variant in ("full", "forward"))
    assert full > state and full > forward


def specs_of(model: Any) -> Any:
    (specs,) = model.config.scale_surgery["expansions"]
    return specs


def test_every_variant_trains_what_it_says(models: Path) -> None:
    variants = {variant: training_cost.load(models, variant, "cpu") for variant in training_cost.VARIANTS}
    counts = {variant: training_cost.count_trained(model) for variant, model in variants.items()}
    assert counts["full"] == sum(parameter.numel() for parameter in variants["full"].parameters())
    one_rank = 4 * (4 * 64 + 2 * (64 + 32) + 3 * (64 + 176))  # four layers: q and o, k and v, the MLP
    assert abs(counts["LoRA"] - counts["preserve"]) <= one_rank / 2
    assert trained_names(variants["preserve"]) == {"up_weight", "w21", "w22"}
    assert trained_names(variants["adapt"]) == {"up_weight", "w12", "w21", "w22"}
    assert specs_of(variants["preserve"])["expanded_layers"] == [0, 1, 2, 3]
    assert specs_of(variants["adapt"])["collaborative"]["layers"] == [2, 3]


def test_ratios_are_those_within_a_round_and_targets_can_be_missed() -> None:
    # the machine was three times slower in the last round; a ratio of medians would say 4 / 3
    costs = [cost("full", [2.0, 4.0, 12.0]), cost("preserve", [1.0, 3.0, 6.0])]
    assert training_cost.ratios(costs)["full"] == {"seconds": 2.0, "processor_seconds": 2.0, "fastest": 2.0}
    costs = [cost("full", [1.8], 3), cost("LoRA", [1.6], 2), cost("preserve", [1.0], 2)]
    assert training_cost.verdicts(costs) == {
        "full: 1.9 times as long": False,
        "LoRA: 1.5 times as long": True,
        "full: more memory": True,
        "LoRA: more memory": False,
    }


@pytest.mark.parametrize("variant", training_cost.VARIANTS)
def test_a_step_changes_what_trains_and_nothing_else(models: Path, variant: str) -> None:
    model = training_cost.load(models, variant, "cpu")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    training_cost.make_step(model, variant, TINY)()
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert changed <= trained
    assert bool(changed) == (variant != "forward")
