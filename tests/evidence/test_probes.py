"""Probes: rules that judge answers, what is kept of the base's, strengths in between, and the limit of forgetting."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from scale_surgery import (
    DataError,
    EvaluationSettings,
    PlanError,
    Request,
    RunOptions,
    evaluate,
    expand,
)
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.checkpoint.records import read_record
from scale_surgery.errors import Problem
from scale_surgery.evidence.evaluate import Evaluation
from scale_surgery.evidence.evaluate_models import Score
from scale_surgery.evidence.forgetting_limit import limit_of
from scale_surgery.evidence.probe_file import Probe, read_probes
from scale_surgery.evidence.probe_rules import first_block, is_exact, is_number, passes
from scale_surgery.evidence.probe_scores import ProbeAnswer, score_answers
from scale_surgery.show.figure_plane import plane_figure
from scale_surgery.show.tables import render_evaluation
from tests.command import run
from tests.conftest import problems, refused, shake, shown
from tests.text.test_tokenizing import lines

CITY = "Q: What is the birth city of Hugo Pickett?\nA:"
PROBES = (
    {"prompt": CITY, "kind": "exact", "answer": "Fresno", "group": "cities"},
    {"prompt": CITY, "kind": "exact", "answer": "Rome", "group": "cities"},
    {"prompt": CITY, "kind": "number", "answer": 7},
)
ADD = "def add(a, b):\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh and a shaken expansion of the shipped model, with probes and texts."""
    place = tmp_path_factory.mktemp("probes")
    expand(SHIPPED_MODEL, Request("last:1", variant="adapt", collaborate="both"), place / "fresh")
    shake(Path(shutil.copytree(place / "fresh", place / "shaken")), by=0.5)
    lines(place / "probes.jsonl", *PROBES)
    lines(place / "old.jsonl", {"question": CITY, "answer": " Fresno"})
    lines(place / "new.jsonl", {"question": "Q: Who?\nA:", "answer": " Xylophone"})
    return place


@pytest.fixture(scope="module")
def result(place: Path) -> Evaluation:
    settings = EvaluationSettings(
        strengths=(0, 0.5, 1), probes_file=place / "probes.jsonl", max_new_tokens=6, max_forgetting=0.5
    )
    return evaluate([place / "fresh", place / "shaken"], place / "old.jsonl", place / "new.jsonl", settings=settings)


def row(result: Evaluation, name: str) -> Score:
    (matching,) = [score for score in result.scores if score.name == name]
    return matching


# rules


@pytest.mark.parametrize(
    ("answer", "right", "expected"),
    [
        (" Paris, of course", "Paris", True),
        ("Paris", " Paris\n", True),
        ("Parisian", "Paris", False),
        ("in Paris", "Paris", False),
        ("paris", "Paris", False),
        ("12", "1", False),
        ("4.5", "4", False),
        ("3/4 of it", "3", False),
        ("1,024", "1", False),
        ("12:30", "12", False),
        ("4, I think", "4", True),
        ("4.", "4", True),
        ("don't", "don", False),
        ("well-known", "well", False),
        ("Paris.2", "Paris", True),
        ("(a)b", "(a)", True),
        ("", "Paris", False),
        ("東京です。", "東京", True),
        ("京都です。", "東京", False),
        ("서울입니다.", "서울", True),
        ("दिल्लीवासी", "दिल्ली", False),
        ("दिल्ली।", "दिल्ली", True),
        ("दिल्ली", "दिल्ल", False),
        ("Cafe\u0301 Central", "Caf\u00e9", True),
        ("7天。", "7", True),
        ("17天。", "7", False),
        ("3万人です", "3", False),
        ("Tokyoです", "Tokyo", True),
        ("BTS입니다", "BTS", True),
        ("BTSx입니다", "BTS", False),
    ],
)
def test_exact(answer: str, right: str, expected: bool) -> None:
    assert is_exact(answer, right) is expected


@pytest.mark.parametrize(
    ("answer", "right", "expected"),
    [
        (" it is 1,024.", "1024", True),
        ("4.0 or 5", "4", True),
        ("-3", "−3.0", True),
        ("10-3", "-3", False),
        ("10-3", "10", True),
        ("1,2", "1", True),
        ("5 or 4", "4", False),
        ("2e3", "2000", True),
        (".5", "0.5", True),
        ("-.5", "-0.5", True),
        (".5", "5", False),
        ("1.5", "5", False),
        ("1e99999999999999999999", "1", False),
        ("答案是-5", "-5", True),
        ("答案是-5", "5", False),
        ("10-3", "-3", False),
        ("four", "4", False),
    ],
)
def test_number(answer: str, right: str, expected: bool) -> None:
    assert is_number(answer, right) is expected


@pytest.mark.parametrize(
    ("answer", "test", "expected"),
    [
        ("    return a + b\n\nprint(1 / 0)", "assert add(2, 3) == 5", True),
        ("    return a - b", "assert add(2, 3) == 5", False),
        ("    return a +", "assert add(2, 3) == 5", False),
        # an answer that leaves before its test did not pass it
        ("    return 0\n    \nx", "", True),
        ("    import os\n    os._exit(0)", "assert add(2, 3) == 5", False),
        ("    import os\n    return (os.listdir(), dict(os.environ))", "assert add(1, 1)[0] == ['probe.py']", True),
    ],
)
def test_python(answer: str, test: str, expected: bool) -> None:
    assert passes(ADD, answer, test, 10) is expected


def test_python_ends_in_time() -> None:
    start = time.monotonic()
    assert not passes(ADD, "    while True: pass", "add(1, 1)", 0.5)
    assert time.monotonic() - start < 5


def test_python_ends_without_the_process_that_waits_for_it(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code = f"import os, time\nopen({str(file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
    line = f"from scale_surgery.evidence.probe_rules import passes; passes({code!r}, '', '', 1)"
    with subprocess.Popen([sys.executable, "-c", line]) as waiting:
        until(lambda: file.is_file() and file.read_text())
        waiting.kill()
    until(lambda: not is_running(int(file.read_text())))


def is_running(number: int) -> bool:
    """Return True if a process has not ended; nobody may have asked how it ended."""
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(holds: Callable[[], Any]) -> None:
    """Wait until something holds, at most 20 seconds."""
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_block_ends_where_it_is_not_indented() -> None:
    assert first_block("    a\n\n    b\nc\n    d") == "    a\n\n    b"
    assert first_block("") == "" and first_block("\n    a") == "\n    a"


# counts


def answers(*right: bool) -> list[ProbeAnswer]:
    return [ProbeAnswer("ab"[place % 2], "", each) for place, each in enumerate(right)]


def test_kept_is_of_what_the_base_knew() -> None:
    base, model = answers(True, True, False, True), answers(True, False, True, True)
    score = score_answers(model, base)
    assert [(count.group, count.right, count.known, count.kept) for count in score.groups] == [
        ("a", 2, 1, 1),
        ("b", 1, 2, 1),
    ]
    assert score.total.kept_share == pytest.approx(2 / 3) and score.lost_share == pytest.approx(1 / 3)
    # a gain makes up for no loss
    assert score.total.share == 0.75
    assert score_answers(model).lost_share is None
    assert score_answers(model, answers(False, False, False, False)).lost_share is None


def test_a_limit_that_was_not_measured_does_not_hold() -> None:
    known, lost = answers(True, True), answers(True, False)
    probes = score_answers(lost, known)
    for most, holds in ((0.5, True), (0.49, False)):
        limit = limit_of([Score("m", "expanded", "b", probes=probes)], most, has_probes=True)
        assert limit.holds is holds and limit.exceeded == (() if holds else ("m",))
    # 1 - 49 / 50 is above 0.02
    of_fifty = score_answers(answers(*[True] * 49, False), answers(*[True] * 50))
    assert limit_of([Score("m", "expanded", "b", probes=of_fifty)], 0.02, has_probes=True).holds
    parts = [Score("m, at 0.5", "strength", "b", forgetting=9.0), Score("b", "base", None)]
    assert limit_of([Score("m", "other", "b", forgetting=0.1), *parts], 0.1, has_probes=False).holds
    for forgetting, code in ((float("nan"), "exceeded"), (None, "unmeasured")):
        limit = limit_of([Score("m", "expanded", "b", forgetting=forgetting)], 1.0, has_probes=False)
        assert not limit.holds and getattr(limit, code) == ("m",)


# models


def test_what_is_kept(result: Evaluation) -> None:
    base, fresh, shaken = (row(result, name) for name in ("biographies (base)", "fresh", "shaken"))
    assert base.probes is not None and base.probes.total.known is None
    assert base.probes.answers[0].text.startswith(" Fresno")
    assert [(count.group, count.asked, count.right) for count in base.probes.groups] == [
        ("cities", 2, 1),
        ("number", 1, 0),
    ]
    assert fresh.probes is not None and fresh.probes.answers == base.probes.answers and fresh.probes.lost_share == 0
    assert shaken.probes is not None and shaken.probes.lost_share == 1
    assert row(result, "shaken, expansion disabled").probes is None, "it is the base"
    assert result.limit is not None and result.limit.exceeded == ("shaken",) and not result.limit.holds


def test_strengths(result: Evaluation) -> None:
    base, shaken = row(result, "biographies (base)"), row(result, "shaken")
    none, half, whole = (row(result, f"shaken, strength {strength}") for strength in ("0", "0.5", "1"))
    assert (none.old, none.new, none.forgetting) == (base.old, base.new, 0.0), "to the last bit"
    assert (whole.old, whole.new) == (shaken.old, shaken.new)
    assert half.old not in (none.old, whole.old) and half.strength == 0.5 and half.kind == "strength"
    assert none.probes is not None and none.probes.lost_share == 0
    assert row(result, "fresh, strength 0.5").forgetting == 0.0, "W12 is zero"
    points = [each.get_text() for each in plane_figure(result.scores).legends[0].get_texts()]
    assert sum(", strength " in point for point in points) == 6


def test_table_and_json(result: Evaluation) -> None:
    table = shown(render_evaluation(result))
    assert "probes: cities  (2 probes)" in table and "all probes  (3 probes)" in table
    assert "0 of 1" in table and "does not hold: shaken forgets more" in " ".join(table.split())
    content = result.to_json()
    json.dumps(content, allow_nan=False)
    (shaken,) = [score for score in content["scores"] if score["name"] == "shaken"]
    assert shaken["probes"]["total"]["lost_share"] == 1 and len(shaken["probes"]["answers"]) == 3
    assert content["limit"]["unit"] == "share of probes lost"
    assert read_record(content, Evaluation) == result, "as learn reads it back"


@pytest.mark.slow
def test_batches_change_no_answer(place: Path, result: Evaluation) -> None:
    settings = EvaluationSettings(probes_file=place / "probes.jsonl", max_new_tokens=6)
    alone = evaluate(place / "shaken", settings=settings, run=RunOptions(batch_size=1))
    probes = row(result, "shaken").probes
    assert probes is not None and row(alone, "shaken").probes == probes
    assert alone.limit is None and row(alone, "shaken").old is None


# refusals, before any model is loaded


def test_files_that_are_refused(tmp_path: Path) -> None:
    def found(*rows: Any, run_python: bool = False) -> list[tuple[str, str]]:
        file = lines(tmp_path / "p.jsonl", *rows)
        return [(each.code, each.where) for each in problems(read_probes, file, run_python=run_python, error=DataError)]

    first = f"{tmp_path}/p.jsonl, line 1"
    assert found({"prompt": " ", "kind": "exact", "answer": "a"}) == [("probe-field-missing", first)]
    assert found({"prompt": "a", "kind": "exact"}) == [("probe-field-missing", first)]
    assert found({"prompt": "a", "kind": "number", "answer": "many"}) == [("probe-without-number", first)]
    assert found({"prompt": "a", "kind": "python"}, run_python=True) == [("probe-field-missing", first)]
    assert found({"prompt": "a", "kind": "other", "answer": "b"})[0][1].startswith(first)
    assert found({"prompt": "a", "kind": "exact", "answer": "b", "grup": "c"})[0][1].startswith(first)
    code = {"prompt": "a", "kind": "python", "test": "b"}
    assert found(code) == [("probes-run-code", f"{tmp_path}/p.jsonl")]
    assert read_probes(tmp_path / "p.jsonl", run_python=True) == (Probe("a", "python", test="b"),)
    (tmp_path / "p.jsonl").write_text("\n{\n")
    assert [each.code for each in problems(read_probes, tmp_path / "p.jsonl", run_python=False)] == ["row-no-json"]
    (tmp_path / "p.jsonl").write_text("\n")
    with refused("file-without-probes", tmp_path / "p.jsonl", DataError):
        read_probes(tmp_path / "p.jsonl", run_python=False)


@pytest.mark.usefixtures("unloaded")
def test_settings_that_are_refused(place: Path, tmp_path: Path) -> None:
    def asked(model: Path, **settings: Any) -> list[Problem]:
        return problems(evaluate, model, place / "old.jsonl", settings=EvaluationSettings(**settings))

    long = Problem("probe-over-context", "probe 1", tokens=13, new=1000, context=64, model="fresh")
    (first, *_) = asked(place / "fresh", probes_file=place / "probes.jsonl", max_new_tokens=1000)
    assert (first.code, first.where, first.values["new"]) == (long.code, long.where, 1000)
    assert [each.code for each in asked(place / "fresh", strengths=(0.5, 2))] == ["strength-out-of-range"]
    assert [each.code for each in asked(place / "fresh", max_forgetting=-1)] == ["value-unfit"]
    more = {"max_forgetting": 2, "probes_file": place / "probes.jsonl"}
    assert [each.code for each in asked(place / "fresh", **more)] == ["value-unfit"], "2 % is 0.02"
    assert [each.code for each in asked(Path(SHIPPED_MODEL), strengths=(0.5,))] == ["strength-without-expansion"]
    with refused("limit-without-measure", "--max-forgetting", DataError):
        evaluate(place / "fresh", new=place / "new.jsonl", settings=EvaluationSettings(max_forgetting=0))
    grown = expand(SHIPPED_MODEL, Request("0", method="grow"), tmp_path / "grown").path
    with refused("grown-not-dialled", "grown", PlanError):
        evaluate(grown, place / "old.jsonl", settings=EvaluationSettings(strengths=(0.5,)))


# the command


def test_command(place: Path, tmp_path: Path) -> None:
    asked = ("--probes", place / "probes.jsonl", "--max-new-tokens", "6", "--max-forgetting")
    written = tmp_path / "result.json"
    run("evaluate", place / "fresh", *asked, "0")
    run("evaluate", place / "shaken", *asked, "0.9", "-o", written, code=1)
    assert json.loads(written.read_text())["limit"]["exceeded"] == ["shaken"]
    texts = ("--old", place / "old.jsonl", "--max-forgetting")
    run("evaluate", place / "fresh", *texts, "0")
    shown_ = run("evaluate", place / "shaken", *texts, "0.01", "--strength", "0,0.5", code=1).stdout
    assert "at most 0.01 (nats per token), does not hold" in " ".join(shown_.split())
    assert "shaken, strength 0.5" in shown_
    run("evaluate", place / "fresh", "--old", place / "old.jsonl", "--strength", "half", code=2)
