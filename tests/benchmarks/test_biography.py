"""The continual-learning benchmark, on runs that take seconds: methods start right, records resume, rules hold."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.biography import compare as biography
from benchmarks.biography import report as biography_report
from benchmarks.biography.methods import BOTH_3, GROWING, INITS, METHODS, ROUTED, STREAM, Method
from benchmarks.biography.runs import Examination, Point, Run, new_batches, train
from benchmarks.harness import Records
from scale_surgery.biographies import (
    SHIPPED_MODEL,
    first_token_accuracy,
    people,
)
from scale_surgery.biographies import (
    biography as tell,
)
from tests.conftest import shown

ADAPTERS = ("LoRA", "PiSSA")
MATCHED = [
    method
    for method in {method.name: method for method in (*METHODS, *GROWING)}.values()
    if method.name not in ("full", "grow-train")
]
PARAMETERS = 295_552
QUICK = biography.QUICK
QUIET = Console(quiet=True)
TOKENS = torch.arange(3, 63).view(2, 30)


def named(name: str) -> Method:
    return {method.name: method for method in (*METHODS, *GROWING, *ROUTED)}[name]


def make(method: Method) -> Any:
    if method.name in ADAPTERS:
        pytest.importorskip("peft")
    return method.make(SHIPPED_MODEL, 0)


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model.eval()(input_ids=TOKENS).logits


@pytest.fixture(scope="module")
def base_logits() -> torch.Tensor:
    return logits(AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL))


@pytest.fixture(scope="module")
def examination() -> Examination:
    return Examination(AutoTokenizer.from_pretrained(SHIPPED_MODEL), QUICK)


@pytest.mark.parametrize(
    "method",
    {method.name: method for method in (*METHODS, *GROWING, *INITS.values(), *ROUTED)}.values(),
    ids=lambda method: method.name,
)
def test_every_method_starts_at_the_base(method: Method, base_logits: torch.Tensor) -> None:
    method_logits = logits(make(method))
    tolerance = 1e-4 if method.name == "PiSSA" else 0.0  # its residual and its factors are rounded
    assert torch.allclose(method_logits, base_logits, rtol=0, atol=tolerance)


@pytest.mark.parametrize("method", MATCHED, ids=lambda method: method.name)
def test_trained_parameters_match(method: Method) -> None:
    trained = sum(parameter.numel() for parameter in make(method).parameters() if parameter.requires_grad)
    assert trained == pytest.approx(PARAMETERS, rel=0.02)


def test_quick_run_learns_and_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = tmp_path / "records.jsonl"
    arguments = ["--quick", "--method", "full", "--seeds", "2", "-o", str(records)]
    first = CliRunner().invoke(biography.main, arguments, catch_exceptions=False)
    done = Records(records, Run).read()
    assert first.exit_code == 0
    assert max(map(len, first.output.splitlines())) <= 80
    assert {record.points[0].old_accuracy for record in done} == {1.0}
    best = biography.choose([record for record in done if record.seed == 0])
    assert best.end.new_loss < best.points[0].new_loss - 0.1
    assert {record.seed for record in done if record.rate == best.rate} == {0, 1}

    monkeypatch.setattr(biography, "run", None)  # calling it would fail
    second = CliRunner().invoke(biography.main, arguments, catch_exceptions=False)
    assert second.output and first.output.endswith(second.output)
    assert Records(records, Run).read() == done


def scored(rate: float, new: float, old: float) -> Run:
    start, middle = Point(0, 1.0, 0.0, 0.4, 1.5, 1.0), Point(4, 0.9, 0.5 * new, 0.4, 1.2, 0.95)
    points = (start, middle, Point(8, old, new, 0.6, 0.5, 0.9))
    return Run("full", rate, 0, QUICK, 100, 1.0, points)


def test_rule_is_the_lowest_rate_that_learns_all() -> None:
    assert biography.choose([scored(1, 0.98, 0.9), scored(2, 1.0, 0.2), scored(3, 1.0, 0.3)]).rate == 2
    assert biography.choose([scored(1, 0.995, 0.2), scored(2, 1.0, 0.9)]).rate == 1


@pytest.mark.parametrize("best", [1e-4, 1e-3, 3e-2])
def test_sweep_widens_until_the_best_is_inside(best: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tried = []

    def fake(method: Method, rate: float, *rest: object) -> Run:
        tried.append(rate)
        return scored(rate, 1 / (1 + abs(torch.tensor(rate / best).log().item())), 0.5)

    monkeypatch.setattr(biography, "run", fake)
    chosen = biography.Bench(QUICK, tmp_path / "records", QUIET).sweep(named("full"))
    assert chosen.rate == best
    assert min(tried) < best < max(tried)
    assert biography.half_a_step_below(best) in tried


def trained(method: Method, examination: Examination) -> Any:
    """Three steps at a rate that changes what the model says."""
    model, settings = method.make(SHIPPED_MODEL, 0), dataclasses.replace(QUICK, steps=3)
    texts = new_batches(examination.tokenizer, settings, 0)
    list(train(model, 1e-2, texts, examination, settings, routes_late=method.routes_late))
    return model.eval()


def test_routed_at_inference_only_trains_as_without_a_router(examination: Examination) -> None:
    unrouted, late = trained(BOTH_3, examination), trained(named("both 3 posterior"), examination)
    always = trained(named("both 3 posterior, trained"), examination).state_dict()
    tensors = late.state_dict()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in unrouted.state_dict().items())
    assert not all(torch.equal(tensor, tensors[name]) for name, tensor in always.items())
    assert late.is_routing_enabled
    assert not torch.equal(logits(late), logits(unrouted))
    with late.routing_disabled():
        assert torch.equal(logits(late), logits(unrouted))


def test_targets_are_judged() -> None:
    judged = [target.of(scored(1, 0.99, 0.985), scored(1, 1.0, 0.5)) for target in biography_report.TARGETS]
    assert judged == pytest.approx([98.5, 99.0, 0.2, 100.0])
    met = [target.is_met(value) for target, value in zip(biography_report.TARGETS, judged, strict=True)]
    assert met == [False, True, False, True]
    groups = {"adapt both 3": [scored(1, 1.0, 0.5)], "both 3 posterior": [scored(1, 0.99, 0.985)]}
    table = shown(biography_report.render_targets(groups))
    assert "98.5 -" in table and "99.0 +" in table and "adapt" not in table


def test_scores_do_not_depend_on_the_batch(examination: Examination) -> None:
    model = trained(named("both 3 posterior"), examination)
    asked = [*examination.old_questions[:12], *examination.new_questions[:12]]
    alone = [first_token_accuracy(model, examination.tokenizer, [question]) for question in asked]
    # a long text beside them pads every prompt
    long = dataclasses.replace(asked[0], prompt=f"{tell(people(1)[0])} {asked[0].prompt}")
    together = first_token_accuracy(model, examination.tokenizer, [*asked, long])
    last = first_token_accuracy(model, examination.tokenizer, [long])
    assert 25 * together == pytest.approx(sum(alone) + last)
    assert 0 < sum(alone) < 24


def test_figures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from benchmarks.biography.figures import DRAWINGS, LOOKS, draw

    runs = [dataclasses.replace(scored(1, 1.0, 0.5), seed=seed) for seed in range(2)]
    figures = {"methods": [method.name for method in METHODS], "inits": list(INITS)}
    for name, methods in (("growing", GROWING), ("stream", STREAM), ("routed", ROUTED)):
        figures[name] = [method.name for method in methods]
    for figure, names in figures.items():
        assert draw(figure, dict.fromkeys(names, runs), tmp_path).read_bytes().startswith(b"\x89PNG")
        # the legend names each method, and no two look the same
        drawn = Figure()
        DRAWINGS[figure](drawn, dict.fromkeys(names, runs))
        assert [text.get_text() for text in drawn.legends[0].get_texts()][: len(names)] == names
        assert len({LOOKS[name] for name in names}) == len(names)
