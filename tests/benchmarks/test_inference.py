"""The benchmark of inference runs on a tiny shape, its dense models are as large as they should be, and it can fail."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import inference, inference_models, training_cost
from benchmarks.device import Place
from benchmarks.inference import Case, Cost, Measured
from benchmarks.inference_models import Variant
from benchmarks.make_checkpoint import SHAPES, Shape, tensor_shapes
from benchmarks.routing_cost import count_multiplications

TINY, LARGE = SHAPES["tiny"], SHAPES["h1024"]
PLACE = Place("cpu", "float32", 1)
FUSED, BLOCKS = Variant("adapt fused", "fused", "dense"), Variant("adapt", "blocks", "dense")
DENSE = Variant("dense", "dense", "dense")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def variants(folder: Path) -> list[Variant]:
    return inference_models.make_models(folder, TINY, PLACE, "last:2")


@pytest.fixture(scope="module")
def models(folder: Path, variants: list[Variant]) -> dict[str, Any]:
    return {variant.name: inference_models.load(folder, variant, "cpu") for variant in variants}


def costs_of(fused: list[float], blocks: list[float]) -> list[Cost]:
    seconds = {"dense": [1.0, 2.0, 6.0], "adapt fused": fused, "adapt": blocks}
    return [Cost("1x1", name, taken, [2 * second for second in taken]) for name, taken in seconds.items()]


def test_all_is_measured_and_written(
    tmp_path: Path, folder: Path, variants: list[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    # models take seconds to write: those of the other tests serve here too
    def link_models(target: Path, shape: Shape, place: Place, layers: str) -> list[Variant]:
        asked.append((shape, place.dtype, layers))
        for model in folder.iterdir():
            (target / model.name).symlink_to(model)
        return variants

    monkeypatch.setattr(inference, "make_models", link_models)
    output = tmp_path / "numbers.json"
    run = CliRunner().invoke(inference.main, ["--quick", "--threads", "1", "-o", str(output)], catch_exceptions=False)
    assert run.exit_code == 0, run.output
    assert asked == [(TINY, "float32", "all"), (TINY, "float32", "last:2")]
    assert "…" not in run.output and max(map(len, run.output.splitlines())) <= 80
    report = json.loads(output.read_text())
    assert [expansion["layers"] for expansion in report["expansions"]] == ["all", "last:2"]
    dense = ["dense (preserve)", "dense (adapt)"]
    names = ["base", "preserve", "preserve fused", "adapt", "adapt fused", *dense]
    cases = ["1x1", "8x1", "1x4", "8x4", "1x8", "8x8", "gen"]
    for expansion in report["expansions"]:
        assert [size["variant"] for size in expansion["sizes"]] == names
        assert [(cost["case"], cost["variant"]) for cost in expansion["costs"]] == [
            (c, n) for c in cases for n in names
        ]
        assert all(len(cost["seconds"]) == len(cost["processor_seconds"]) == 1 for cost in expansion["costs"])
        assert {ratio["by_dense"]["seconds"] for ratio in expansion["ratios"] if ratio["variant"] in dense} == {1.0}
        judged = [ratio for ratio in expansion["ratios"] if ratio["form"] in report["targets"]]
        assert len(judged) == 4 * len(cases)
        for clock, missed in expansion["missed"].items():
            assert missed == [ratio for ratio in judged if ratio["by_dense"][clock] > report["targets"][ratio["form"]]]


def test_ratios_are_those_within_a_round() -> None:
    # a ratio of medians would say 8 / 2
    _, fused, blocks = inference.compare([DENSE, FUSED, BLOCKS], costs_of([2.0, 8.0, 18.0], [1.0, 2.0, 6.0]))
    assert fused.by_dense == {"seconds": 3.0, "processor_seconds": 3.0, "fastest": 2.0}
    assert fused.milliseconds == 8000
    assert set(blocks.by_dense.values()) == {1.0}


@pytest.mark.parametrize(("times", "is_missed"), [(1.04, False), (1.06, True)])
def test_the_target_can_be_missed_by_either_clock(times: float, is_missed: bool) -> None:
    # blocks may take longer
    taken = [times * seconds for seconds in (1.0, 2.0, 6.0)]
    dense, fused, blocks = costs_of(taken, taken)
    disturbed = replace(fused, seconds=[10.0, 20.0, 60.0])
    measured = Measured("all", [DENSE, FUSED, BLOCKS], [], [dense, disturbed, blocks])
    missed = {
        clock: [ratio.variant for ratio in measured.ratios if ratio.is_missed(clock)] for clock in training_cost.CLOCKS
    }
    assert missed == {"seconds": ["adapt fused"], "processor_seconds": ["adapt fused"] * is_missed}
    verdict = inference.render_verdict(measured, "fused", "processor_seconds")
    assert ("NOT reached: adapt fused: 1x1 1.060" in verdict) == is_missed
    assert "NOT" not in inference.render_verdict(measured, "blocks", "seconds")
    measured = Measured("all", [DENSE, FUSED, BLOCKS], [], costs_of([1.0, 2.0, 6.0], [1.3, 2.6, 7.8]))
    assert [ratio.variant for ratio in measured.ratios if ratio.is_missed("seconds")] == ["adapt"], (
        "blocks have their own"
    )


def test_a_dense_model_is_as_large_as_the_expansion_it_stands_for() -> None:
    grown = replace(LARGE, hidden=1152, inner=3168, heads=18, key_value_heads=9)
    parameters = inference_models.count_parameters(grown)
    assert parameters == sum(map(prod, tensor_shapes(grown).values())) == 193_186_944
    assert inference_models.dense_shape(LARGE, parameters) == grown
    # what preserve has on all layers, and each expansion on the upper half
    for parameters in (181_390_464, 170_657_920, 176_556_160):
        shape = inference_models.dense_shape(LARGE, parameters)
        assert inference_models.count_parameters(shape) == pytest.approx(parameters, rel=0.002)
        assert shape.layers == LARGE.layers and shape.hidden // shape.heads == 64


def test_models_are_stock_or_have_the_parameters_they_should(models: dict[str, Any]) -> None:
    counts = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    stock = {name for name, model in models.items() if type(model).__name__ == "LlamaForCausalLM"}
    assert stock == {"base", "dense (preserve)", "dense (adapt)"}
    assert counts["preserve"] < counts["adapt"] == counts["adapt fused"] == counts["preserve fused"]
    for name in ("preserve", "adapt"):
        # the smallest step of the inner width is 1.5 % here
        assert counts[f"dense ({name})"] == pytest.approx(counts[name], rel=0.015)


# 4 layers of 4 heads; 2 more in the upper 2 layers, or in all 4
@pytest.mark.parametrize(("name", "heads"), [
    ("base", 16),
    ("preserve", 20),
    ("adapt", 20),
    ("adapt fused", 20),
    ("dense (adapt)", 16),
])  # fmt: skip
def test_counted_is_what_torch_multiplies_but_for_attention(models: dict[str, Any], name: str, heads: int) -> None:
    call = inference.make_call(models[name], Case("1x1", 1, 1))
    assert count_multiplications(call) == inference_models.count_multiply_adds(models[name]) + 2 * 16 * heads
