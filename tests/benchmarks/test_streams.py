"""Ten tasks in a row, on runs of two steps: what is asked, what answers, what is recorded and what the report says."""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.harness import Records
from benchmarks.streams.asking import Examiner
from benchmarks.streams.compare import BY_NAME
from benchmarks.streams.learning import Settings
from benchmarks.streams.report import courses, summary
from benchmarks.streams.runs import Key, Run, run
from benchmarks.streams.tasks import base_task, tasks
from scale_surgery.biographies import SHIPPED_MODEL, SHIPPED_PEOPLE, people

QUICK = Settings(tasks=2, size=2, steps=2, rows=1, samples=16, old_questions=6)


@pytest.fixture(scope="module")
def examiner() -> Examiner:
    return Examiner(AutoTokenizer.from_pretrained(SHIPPED_MODEL))


def test_tasks_share_no_question_and_tell_what_they_ask() -> None:
    known = {person.name for person in people(SHIPPED_PEOPLE)}
    made = [*tasks(10, 0), *tasks(10, 1)]
    asked = [question.prompt for task in made[:10] for question in task.asked]
    groups = [person.name for task in made for person in task.group]

    assert len(set(asked)) == len(asked)
    assert len(set(groups)) == len(groups) == 2 * 6 * 20 and not known & set(groups)
    for task in made:
        texts = set(islice(task.texts(0), 2000))
        assert {question.text for question in task.asked} <= texts
        assert len(texts) > len(task.asked)


def test_an_answer_is_right_when_all_of_it_is(examiner: Examiner) -> None:
    model, asked = AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL), base_task(12).asked

    assert examiner.right(model, asked) == [True] * 12
    dates = [
        replace(question, answer=question.answer[:-1] + str(9 - int(question.answer[-1]))) for question in asked[::6]
    ]
    assert examiner.right(model, [asked[1], *dates]) == [True, False, False]


@pytest.mark.parametrize(
    ("name", "rehearses"),
    [
        ("full", False),
        pytest.param("full", True, marks=pytest.mark.slow),
        pytest.param("composed preserve", False, marks=pytest.mark.slow),
        pytest.param("LoRA merged", False, marks=pytest.mark.slow),
    ],
)
def test_a_run_is_recorded(name: str, rehearses: bool, examiner: Examiner, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    key, method = Key(name, rehearses, 0, QUICK), BY_NAME[name]
    done = run(method, key, examiner.tokenizer)
    Records(tmp_path / "runs.jsonl", Run).append(done)

    assert Records(tmp_path / "runs.jsonl", Run).read() == [done]
    assert done.kinds == ("people", "capitals") and list(done.rows) == list(method.shown)
    for rows in done.rows.values():
        assert [len(row) for row in rows] == [2, 3]
        assert rows[0][0] > 0.5, "two steps do not make it forget all"
    if name != "full":
        assert done.parameters < 300_000


def test_kept_is_a_share_of_what_was_learned(tmp_path: Path) -> None:
    key = Key("full", False, 0, replace(QUICK, tasks=2))
    first = Run(key, ("people", "lists"), 5, 1.0, (0.5, 1.0), {"": ((1.0, 0.5), (0.8, 0.25, 1.0))})
    second = replace(first, key=replace(key, seed=1), rows={"": ((1.0, 0.5), (0.6, 0.0, 1.0))})
    (course,) = courses([first, second])

    assert course.kept == pytest.approx((0.5 + 1 + 0 + 1) / 4)
    assert course.ends == pytest.approx([0.7, 0.125, 1.0])
    assert list(summary([course]))[2] == ("| full fine-tuning | none | 5 | 75.0% | 62.5% | 56.2% | 12.5% | 70.0% | 2 |")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # matplotlib builds its font cache
        from benchmarks.streams.figures import draw_retention
    draw_retention([course], tmp_path / "streams.png")
    assert (tmp_path / "streams.png").stat().st_size > 1000
