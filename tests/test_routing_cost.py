"""The benchmark of routing: what it predicts, what it counts, and that its judgement can fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.routing_cost import Case, Cost, compare, measure_case, missed, render_verdict
from benchmarks.routing_memory import MODES, Peak, extra_logits, measure_cache
from benchmarks.routing_models import SHAPES, Settings, Variant, formula, load, make_models

TINY = Settings(
    shape="tiny", length=16, rounds=1, device="cpu", dtype="float32", threads=1, is_quick=True
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Variant], dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("routing_cost")
    variants = make_models(folder, SHAPES["tiny"], "float32", [0])
    return variants, {variant.name: load(folder, variant, "cpu") for variant in variants}


def test_the_formula_counts_the_layers_that_run_twice() -> None:
    assert [formula(16, preserved) for preserved in (0, 8, 15, 16)] == [2.0, 1.5, 1.0625, 1.0]


def test_every_variant_takes_its_turn(made: tuple[list[Variant], dict[str, Any]]) -> None:
    variants, models = made
    costs = measure_case(models, Case("forward", 1, 8), TINY)
    assert [cost.variant for cost in costs] == [variant.name for variant in variants]
    ratios = {ratio.variant: ratio for ratio in compare(variants, costs)}
    assert ratios["base"].by_base == 1.0 and not ratios["base"].is_routed
    routed = ratios["L_fp 0 posterior"]
    assert routed.is_routed and routed.formula == 2.0
    # two paths, one of them without an up stream
    assert 1.5 < routed.counted < 2.0


def test_a_cache_of_two_paths_is_counted(made: tuple[list[Variant], dict[str, Any]]) -> None:
    variants, models = made
    caches = {variant.name: measure_cache(models[variant.name], variant) for variant in variants}
    unrouted = caches["L_fp 0"].bytes
    assert caches["L_fp 0 cosine"].bytes == 2 * unrouted and caches["L_fp 0 cosine"].router_bytes == 0
    assert caches["base"].bytes < unrouted < caches["L_fp 0 posterior"].bytes < 2 * unrouted
    assert caches["L_fp 0 posterior"].router_bytes == 4 * (models["base"].config.vocab_size + 1)


def test_what_costs_too_much_is_named() -> None:
    variants = [Variant("base", "base"), Variant("one", "base", "posterior", formula=1.5)]

    def judged(seconds: float) -> str:
        base = Cost("forward", "base", 10, [1.0], [1.0])
        ratios = compare(variants, [base, Cost("forward", "one", 15, [seconds], [seconds])])
        assert bool(missed(ratios)) == (seconds > 1.65)
        return render_verdict(ratios)

    assert judged(1.6) == "at most 1.1 x the formula: 1 of 1"
    assert judged(1.8).splitlines()[1] == "  NOT reached: forward, one: 1.20"


def test_extra_logits_are_those_above_the_unrouted_model() -> None:
    variants = [Variant("base", "base"), Variant("one", "base", "cosine")]
    peaks = [Peak(name, mode, value) for mode in MODES for name, value in (("base", 1.0), ("one", 2.25))]
    assert extra_logits(variants, peaks) == {("one", mode): 1.25 for mode in MODES}
