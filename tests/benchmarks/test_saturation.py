"""Saturation, on runs of a few steps: rows and questions agree, runs are compared at equal learning."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks.harness import Records, beside, sweep
from benchmarks.saturation.__main__ import choose
from benchmarks.saturation.bases import Base
from benchmarks.saturation.facts import BEGIN, END, ROW, WORDS, facts, questions, rows
from benchmarks.saturation.report import FIRST, RECORDS, gaps, main, recorded, runs_of, table
from benchmarks.saturation.runs import FIRST_NEW, Key, Point, Run, Settings, run

QUICK = Settings(new_people=8, asked=8, steps=4, together=4, every=2, samples=8)
BASE = Base(people=16, passes=600)


def test_rows_state_what_questions_ask() -> None:
    known = facts(3)
    (batch,) = [next(rows(known, 3, random.Random(0)))]
    asked, answers = questions(known)

    assert batch.shape == (3, ROW) and set(batch[:, 0].tolist()) == {BEGIN} and set(batch[:, -1].tolist()) == {END}
    stated = {(*row[1:4], *pair) for row in batch.tolist() for pair in pairwise(row[4:])}
    assert len(asked) == 18
    for question, answer in zip(asked.tolist(), answers.tolist(), strict=True):
        assert question[0] == BEGIN and (*question[1:], answer) in stated


def test_new_people_are_none_of_the_old_ones() -> None:
    assert len(set(WORDS)) == len(WORDS)
    old, new = facts(4000), facts(250, FIRST_NEW)
    names = [tuple(name) for name, _ in [*old, *new]]
    assert len(set(names)) == len(names)
    # of initials of both groups alike: nothing but the name tells them apart
    assert len({name[1] for name in names[-250:]}) == len({name[1] for name in names[:4000]}) == 26


def made(new: list[float], kept: list[float], rate: float = 1e-3) -> Run:
    points = tuple(Point(20 * step, *scores, scores[1], 1.0) for step, scores in enumerate(zip(new, kept, strict=True)))
    return Run(Key(BASE, "full", False, rate, 0, QUICK), 1, 1.0, (1.0, 0.0), points)


def test_runs_are_compared_where_they_have_learned_as_much() -> None:
    half = made([0.0, 0.4, 0.8], [1.0, 0.9, 0.7])
    assert half.matched is not None
    assert half.matched.step == pytest.approx(30) and half.matched.kept == pytest.approx(0.8)
    assert made([0.0, 0.4, 0.55], [1.0, 0.9, 0.9]).matched is None
    assert half.at(0.2).kept == pytest.approx(0.95) and half.at(0.9) is None
    # one that never learned is chosen over none that did
    forgetful, lazy = made([0.0, 1.0], [1.0, 0.1], 1e-2), made([0.0, 0.5], [1.0, 1.0], 1e-4)
    assert choose([half, forgetful, lazy]) is half and choose([lazy]) is lazy


def test_the_report_has_runs_of_the_settings_alone(tmp_path: Path) -> None:
    records = Records(tmp_path / "runs.jsonl", Run)
    pilot = made([0.0, 1.0], [1.0, 0.5])
    records.append(pilot)
    records.append(replace(pilot, key=replace(pilot.key, settings=Settings(), rate=1e-2, method="adapt")))

    printed = CliRunner().invoke(main, ["-o", str(records.file)], catch_exceptions=False).output
    assert "adapt" in printed and "full" not in printed


def test_a_sweep_goes_on_until_the_best_is_inside() -> None:
    tried = sweep(lambda rate: rate, 1e-3, beside, lambda rates: min(rates, key=lambda rate: abs(rate - 1e-2)))
    assert sorted(tried) == [3e-4, 1e-3, 3e-3, 1e-2, 3e-2]


@pytest.mark.parametrize("method", ["full", "adapt", pytest.param("gated", marks=pytest.mark.slow)])
def test_a_run_is_recorded_and_not_run_again(tmp_path: Path, method: str) -> None:
    torch.set_num_threads(1)
    key = Key(BASE, method, True, 1e-3, 0, QUICK)
    records = Records(tmp_path / "runs.jsonl", Run)
    done = records.once(key, lambda: run(key, tmp_path))

    assert [point.step for point in done.points] == [0, 2, 4]
    assert done.points[0].kept == done.points[0].kept_test == 1.0
    assert records.once(key, lambda: pytest.fail("is run again")) == done


def test_the_page_of_results_has_the_table_of_the_records() -> None:
    page = (Path(__file__).parents[2] / "docs" / "results.md").read_text(encoding="utf-8")
    rows = [line.split(" | ", 2)[2] for line in table(recorded())[2:]]
    assert len(rows) == 13 and all(f" | {row}\n" in page for row in rows)
    record = (RECORDS.with_name("README.md")).read_text(encoding="utf-8")
    for settings, text in ((Settings(), page), (Settings(), record), (FIRST, record)):
        levels = gaps(runs_of(settings), "preserve")
        assert len(levels) == 6 and "\n".join(levels) in text
