"""The benchmark of places: measures of the base stream and of W12, lines, tables, figures, and quick runs."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoTokenizer

from benchmarks.biography import layers as biography_layers
from benchmarks.biography import layers_report as biography_layers_report
from benchmarks.biography import pilots as biography_pilots
from benchmarks.biography.compare import QUICK
from benchmarks.biography.methods import PRESERVE
from benchmarks.biography.pilots import Proposal, read_proposals
from benchmarks.biography.places import DEPTHS, GROWN, NORM, PAIRS, WIDENED, collaborate
from benchmarks.biography.runs import (
    Examination,
    Point,
    Run,
    append_record,
    new_batches,
    read_records,
    train,
    w12_norm,
)
from scale_surgery.biographies import SHIPPED_MODEL
from tests.conftest import shown


@pytest.fixture(scope="module")
def examination() -> Examination:
    return Examination(AutoTokenizer.from_pretrained(SHIPPED_MODEL), QUICK)


def trainable(model: Any) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def sizes(model: Any) -> int:
    return sum(parameter.numel() for parameter in trainable(model).values())


def w12_layers(model: Any) -> set[int]:
    return {int(name.split("layers.")[1].split(".")[0]) for name in trainable(model) if name.endswith(".w12")}


def test_w12_stands_in_the_layers_from_the_preserved_depth_on() -> None:
    for methods in DEPTHS.values():
        for lowest, method in methods.items():
            assert w12_layers(method.make(SHIPPED_MODEL, 0)) == set(range(lowest, 4))
    named = {scope: set(trainable(method.make(SHIPPED_MODEL, 0))) for scope, method in NORM.items()}
    w12 = {scope: {name.split(".")[3] for name in names if name.endswith(".w12")} for scope, names in named.items()}
    assert w12 == {"attn": {"self_attn"}, "ffn": {"mlp"}}


def test_pairs_of_layers_train_as_many_parameters() -> None:
    widened = {pair: sizes(method.make(SHIPPED_MODEL, 0)) for pair, method in WIDENED.items()}
    assert max(widened.values()) < 1.01 * min(widened.values())
    assert {sizes(GROWN[pair].make(SHIPPED_MODEL, 0)) for pair in (PAIRS[0], PAIRS[-1])} == {196_608}


def test_base_stream_stays_in_preserve_and_turns_where_w12_trains(examination: Examination) -> None:
    ends = {}
    for method in (PRESERVE, collaborate("attn", 0)):
        points = list(
            train(method.make(SHIPPED_MODEL, 0), 1e-2, new_batches(examination.tokenizer, QUICK, 0), examination, QUICK)
        )
        assert points[0].cosine == pytest.approx(1, abs=1e-6)
        ends[method.name] = points[-1]
    assert ends["preserve"].cosine == pytest.approx(1, abs=1e-6)
    assert ends["preserve"].w12_norm is None
    assert ends["collaborate attn 0"].cosine < 0.99
    assert ends["collaborate attn 0"].w12_norm > 0.1


def test_norm_of_w12_is_that_of_a_layer() -> None:
    model = collaborate("both", 2).make(SHIPPED_MODEL, 0)
    assert w12_norm(model) == 0.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".w12"):
                parameter.fill_(3.0 if ".3." in name else 0.0)
    filled = sum(value.numel() for name, value in trainable(model).items() if name.endswith(".w12") and ".3." in name)
    assert w12_norm(model) == pytest.approx(3 * math.sqrt(filled) / 2)  # the other of two layers has none


def test_line_is_found_with_its_share_of_variance() -> None:
    exact = biography_layers_report.fit([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)])
    assert (exact.slope, exact.intercept, exact.r_squared, exact.points) == pytest.approx((2, 1, 1, 3))
    assert biography_layers_report.fit([(0.0, 0.0), (1.0, 1.0), (2.0, 0.0)]).r_squared == pytest.approx(0)


def scored(seed: int = 0, norm: float | None = 2.0) -> Run:
    start, middle = Point(0, 1.0, 0.0, 0.4, 1.5, 1.0, 0.0), Point(4, 0.9, 0.5, 0.5, 1.2, 0.95, 1.0)
    points = (start, middle, Point(8, 0.8, 1.0, 0.8, 0.5, 0.9, norm))
    return Run("any", 1e-3, seed, QUICK, 100, 1.0, points)


def proposal(seed: int, changes: tuple[float, ...]) -> Proposal:
    return Proposal(seed, QUICK, 1.0, changes, (1, 2))


def test_tables_say_what_pilots_propose() -> None:
    proposals = [proposal(0, (0.3, 0.4, 0.2, 0.1)), proposal(1, (0.3, 0.2, 0.4, 0.1))]
    assert [choice.pair for choice in proposals] == [(0, 1), (0, 2)]
    pairs = shown(biography_layers_report.render_pairs({pair: [scored(), scored(1)] for pair in PAIRS}, proposals))
    lines = {line[:4]: line for line in pairs.splitlines()}
    assert lines["0, 1"].endswith(" 1") and lines["0, 2"].endswith(" 1") and not lines["1, 3"].endswith(" 1")
    table = shown(biography_layers_report.render_proposals(proposals))
    assert "seed 1  30.00%  20.00%  40.00%  10.00% 1, 2" in table


@pytest.mark.slow  # seconds of training, and what it is made of has tests of its own
def test_quick_runs_are_tabulated_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(biography_layers, "NORM_RATES", (3e-3,))
    monkeypatch.setattr(biography_layers, "PAIRS", {"adapt": {(0, 1): WIDENED[0, 1]}, "grow": {(0, 1): GROWN[0, 1]}})
    monkeypatch.setattr(biography_layers, "DEPTHS", {"attn": {lowest: DEPTHS["attn"][lowest] for lowest in (2, 4)}})
    append_record(tmp_path / "records.pilots.jsonl", proposal(0, (0.3, 0.4, 0.2, 0.1)))
    for figure in biography_layers.FIGURES:
        options = ["--quick", "--seeds", "1", "--images", str(tmp_path), "-o", str(tmp_path / "records.jsonl")]
        done = CliRunner().invoke(biography_layers.main, ["--figure", figure, *options], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        assert max(map(len, done.output.splitlines()[:-1])) <= 80, done.output
        assert (tmp_path / f"biography-{figure}.png").read_bytes().startswith(b"\x89PNG")
    runs = read_records(tmp_path / "records.jsonl")
    # of both figures that have it, the same run
    assert [run.method for run in runs].count("collaborate attn 2") == 1
    assert len(runs) == 5
    assert all(run.end.new_loss < run.points[0].new_loss for run in runs)


def test_pilot_reads_what_runs_train_on(tmp_path: Path) -> None:
    settings = dataclasses.replace(QUICK, new_people=6, old_texts=4, steps=1)
    pilot = biography_pilots.propose(0, settings)
    assert len(pilot.changes) == 4 and all(change > 0 for change in pilot.changes) and set(pilot.tied) <= {0, 1, 2, 3}
    file = tmp_path / "pilots.jsonl"
    append_record(file, pilot)
    assert read_proposals(file) == [pilot]
    assert json.loads(file.read_text())["seed"] == 0
