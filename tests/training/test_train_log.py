"""What `train` writes where stderr is a file: a run of hours that nobody watches says how it goes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from scale_surgery.show import log_lines
from tests.command import run_logged, terminated_at
from tests.training.test_distributed import ROOT

LINE = re.compile(
    r"(?P<time>\d\d:\d\d:\d\d)  training  step (?P<step>\d+) of (?P<steps>\d+)  (?P<note>.*?)"
    r"(?:  (?P<rate>[\d,]+) tokens/s)?(?:  (?P<left>\d+) s left)?"
)
# with old and new text
WIDEST = 120


def words(place: Path, output: Path, *more: object, steps: int = 6) -> list[object]:
    """A command that measures after every third step, and logs the loss of each."""
    sides = [f"--eval-data={side}={place / side}.jsonl" for side in ("old", "new")]
    set_ = [f"--set={name}" for name in ("log_every=1", "eval_every=3", "save_every=2")]
    short = ["--sequence-length", 32, "--batch-size", 2, "--steps", steps, "--device", "cpu"]
    return ["train", place / "preserve", "--data", place / "texts.jsonl", "-o", output, *sides, *set_, *short, *more]


def lines_of(log: Path) -> list[dict[str, Any]]:
    """The lines of a log, each as its parts."""
    text = log.read_text(encoding="utf-8")
    assert text.endswith("\n") and "\x1b" not in text and "\r" not in text
    assert max(map(len, text.splitlines())) <= WIDEST
    matches = [LINE.fullmatch(line) for line in text.splitlines()]
    assert all(matches), text
    return [match.groupdict() for match in matches if match]


def test_a_log_has_the_beginning_and_each_measurement(place: Path, tmp_path: Path) -> None:
    """With --json too, whose stdout is JSON and nothing else; the losses are those of the result."""
    result = json.loads(run_logged(tmp_path / "log", *words(place, tmp_path / "out", "--json")))
    begins, *measured = lines_of(tmp_path / "log")
    assert (begins["step"], begins["steps"], begins["note"]) == ("0", "6", "begins")
    assert [line["step"] for line in measured] == ["0", "3", "6"]
    entries = [json.loads(line) for line in Path(result["log"]).read_text().splitlines()]
    entries = [entry for entry in entries if "new_nats_per_token" in entry]
    assert [line["note"] for line in measured] == [
        f"loss old {entry['old_nats_per_token']:.4f} ({entry['forgetting']:+z.4f}), "
        f"new {entry['new_nats_per_token']:.4f} ({-entry['learning']:+z.4f})"
        for entry in entries
    ]
    for line, moment in ((measured[0], "before"), (measured[-1], "after")):
        assert f"new {result['change'][moment]:.4f}" in line["note"]
    assert [bool(line["rate"]) for line in measured] == [False, True, True]
    assert [bool(line["left"]) for line in measured] == [False, True, False]


@pytest.mark.slow
def test_without_the_interval_each_step_is_a_line_with_its_loss(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_lines, "INTERVAL", 0.0)
    run_logged(tmp_path / "log", *words(place, tmp_path / "out"))
    text = (tmp_path / "log").read_text(encoding="utf-8")
    assert re.search(r"(?m)^\d\d:\d\d:\d\d  check of files  0 %$", text)
    assert re.search(r"(?m)^\d\d:\d\d:\d\d  training  step 0 of 6  measuring$", text)
    (tmp_path / "steps").write_text(
        "".join(line for line in text.splitlines(keepends=True) if "training  step" in line)
    )
    notes = [line["note"] for line in lines_of(tmp_path / "steps") if re.fullmatch(r"loss [\d.]+", line["note"])]
    entries = [json.loads(line) for line in (tmp_path / "out/training/log.jsonl").read_text().splitlines()]
    losses = [entry["loss"] for entry in entries if "loss" in entry]
    # a step is shown with the latest entry of the log, which is that of the step before
    assert notes == [f"loss {loss:.3f}" for loss in losses[:-1]]


@pytest.mark.slow
def test_a_quiet_run_writes_nothing(place: Path, tmp_path: Path) -> None:
    run_logged(tmp_path / "quiet", *words(place, tmp_path / "out", "-q", steps=2))
    assert (tmp_path / "quiet").read_text() == ""


def test_a_run_that_a_scheduler_ends_says_so_and_goes_on(place: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with terminated_at(log, "step 3 of 24"):
        run_logged(log, *words(place, tmp_path / "out", steps=24), code=1)
    *_, last = log.read_text(encoding="utf-8").splitlines()
    stopped = re.search(
        r": interrupted after step (\d+); the folder holds step (\d+)\. Continue with --resume\.$", last
    )
    assert last.startswith(f"error: {tmp_path / 'out'}: ")
    assert stopped is not None and 3 <= int(stopped[1]) < 24, "before its end"
    first = len(log.read_text(encoding="utf-8"))
    run_logged(log, *words(place, tmp_path / "out", "--resume", steps=24))
    resumed, *_, end = log.read_text(encoding="utf-8")[first:].splitlines()
    assert resumed.endswith(f"training  step {stopped[2]} of 24  resumed")
    assert "  training  step 24 of 24  loss old " in end and "left" not in end


def test_the_pages_show_lines_of_this_form() -> None:
    pages = (ROOT / "docs" / f"commands-{name}.md" for name in ("train", "learn"))
    lines = [line for page in pages for line in re.findall(r"(?m)^\d\d:\d\d:\d\d  .*$", page.read_text())]
    stages = [line for line in lines if re.fullmatch(r"[\d:]{8}  [\w-]+  stage \d of \d", line)]
    trained = [line for line in lines if LINE.fullmatch(line)]
    assert len(stages) == 8 and len(trained) > 8 and len(stages) + len(trained) == len(lines)
