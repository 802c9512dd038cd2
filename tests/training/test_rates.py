"""The default learning rate: by the width of the widened model, shown before the first step, and recorded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scale_surgery import Plan, Request, RunOptions, TrainingSettings, TrainingStart, expand, plan, train
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.folder.record import read_manifest
from scale_surgery.training.rates import default_rate, with_rate
from scale_surgery.training.settings import TrainingSchedule
from tests.training.test_train import ask, write_lines

ADAPT = {"variant": "adapt", "collaborate": "both"}
FEW = TrainingSettings(steps=4, warmup=0.25, sequence_length=32, batch_size=2, log_every=1)


def as_wide(made: Plan, hidden: int) -> Plan:
    """The same plan for a wider base, with an eighth of its width added where anything is."""
    facts = replace(made.facts, sizes=replace(made.facts.sizes, hidden=hidden))
    up = hidden // 8 if made.widths.up_width else 0
    return replace(made, facts=facts, widths=replace(made.widths, up_width=up))


@pytest.mark.parametrize(
    ("request_", "rates"),
    (
        # at hidden sizes of 128 (0.4 / 144), 640, 2048 and 4096
        (ADAPT, (2.8e-3, 5.6e-4, 1.7e-4, 8.7e-5)),
        ({"variant": "gated"}, (2.8e-3, 5.6e-4, 1.7e-4, 8.7e-5)),
        # only the head reads the up stream
        ({}, (8.3e-3, 1.7e-3, 5.2e-4, 2.6e-4)),
        # whole matrices: an eighth of 0.4 / 128
        ({"method": "grow"}, (3.9e-4, 7.8e-5, 2.4e-5, 1.2e-5)),
        # no up stream: 0.4 / 128
        ({"method": "depth"}, (3.1e-3, 6.3e-4, 2e-4, 9.8e-5)),
    ),
)
def test_the_rate_falls_with_the_width(request_: dict[str, Any], rates: tuple[float, ...]) -> None:
    made = plan(SHIPPED_MODEL, Request("last:1", **request_))
    assert [default_rate(as_wide(made, hidden)) for hidden in (128, 640, 2048, 4096)] == list(rates)
    assert default_rate(made) == rates[0]


def test_a_wide_up_stream_counts_and_what_is_said_stays() -> None:
    made = plan(SHIPPED_MODEL, Request("last:1", **ADAPT, up_width=128))
    assert default_rate(made) == 1.6e-3, "0.4 / 256"
    assert with_rate(TrainingSettings(), made).learning_rate == 1.6e-3
    assert with_rate(TrainingSettings(learning_rate=0.5), made).learning_rate == 0.5


def test_the_default_is_shown_used_and_recorded(tmp_path: Path) -> None:
    wide = expand(SHIPPED_MODEL, Request("last:1", **ADAPT), tmp_path / "wide").path
    data, cpu = [write_lines(tmp_path / "texts.jsonl", ask(400))], RunOptions(device="cpu")
    for given, expected in ((None, 2.8e-3), (1e-3, 1e-3)):
        announced: list[TrainingSchedule] = []
        start = TrainingStart(overwrite=True, announce=announced.append)
        done = train(wide, data, tmp_path / "made", replace(FEW, learning_rate=given), start=start, run=cpu)
        assert [schedule.learning_rate for schedule in announced] == [expected]
        rates = [json.loads(line).get("learning_rate") for line in done.log.read_text().splitlines()]
        # one of four steps rises
        assert [rate for rate in rates if rate is not None] == pytest.approx(
            [0, expected, expected * 2 / 3, expected / 3]
        )
        (run,) = read_manifest(done.path).expansions["default"].training
        assert run["settings"]["learning_rate"] == expected
