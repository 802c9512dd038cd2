"""What long work writes into a log: not too often, at once, honest about the time left, without escape codes."""

from __future__ import annotations

import os
import pty
import re
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path

import pytest

from scale_surgery.progress import Finding, Steps
from scale_surgery.show import log_lines
from scale_surgery.show.console import Output
from scale_surgery.show.log_lines import INTERVAL, LogLines, format_left

TIME = re.compile(r"\d\d:\d\d:\d\d  ")


class Log:
    """Lines without their time of day, and a clock that somebody turns."""

    def __init__(self) -> None:
        self.now, self.lines = 1000.0, list[str]()
        self.log = LogLines(self.add, lambda: self.now)

    def add(self, line: str) -> None:
        assert TIME.match(line)
        self.lines.append(TIME.sub("", line, count=1))


@pytest.fixture
def log() -> Log:
    return Log()


def work(log: Log, seconds: float, reports: int, total: int | None = None) -> list[str]:
    """The lines of work that reports so often, each time after so many seconds."""
    with log.log.track("hashes", total or reports) as advance:
        for _ in range(reports):
            log.now += seconds
            advance(1)
    return log.lines


def test_a_line_is_written_at_most_every_thirty_seconds(log: Log) -> None:
    assert INTERVAL == 30
    work(log, 1, 100)
    assert log.lines == [f"hashes  {share} %  {left} s left" for share, left in ((30, 70), (60, 40), (90, 10))]


def test_without_the_interval_each_report_is_a_line(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(log_lines, "INTERVAL", 0.0)
    assert len(work(log, 1, 100)) == 101, "and one where it begins"


def test_works_share_the_interval_and_short_ones_write_nothing(log: Log) -> None:
    for _ in range(10):
        work(log, 1, 2)
    assert log.lines == []
    log.now += 11
    work(log, 1, 2)
    assert log.lines == ["hashes  0 %"], "31 seconds after the command began: where it is, before it reports"


def test_stages_and_findings_do_not_wait(log: Log) -> None:
    log.log.line("train", "stage 5 of 10")
    with log.log.track("training", Steps(8, tokens=8000)) as advance:
        advance(0, Finding("begins"))
        log.now += 1
        advance(1, "loss 3.000")
        advance(0, Finding("loss new 2.5000"))
    assert log.lines == [
        "train  stage 5 of 10",
        "training  step 0 of 8  begins",
        "training  step 1 of 8  loss new 2.5000  1,000 tokens/s  7 s left",
    ]


def test_time_left_counts_steps_of_this_run_alone(log: Log) -> None:
    """Of 100 steps an earlier run did 90, in no time; each takes 60 seconds."""
    with log.log.track("training", Steps(100, tokens=6000)) as advance:
        advance(90, Finding("resumed"))
        for _ in range(3):
            log.now += 60
            advance(1)
    assert log.lines == [
        "training  step 90 of 100  resumed",
        "training  step 91 of 100  1 tokens/s  9 min left",
        "training  step 92 of 100  1 tokens/s  8 min left",
        "training  step 93 of 100  1 tokens/s  7 min left",
    ]


def test_tokens_a_second_are_those_of_steps_since_the_line_before(log: Log) -> None:
    """A step reads 100 tokens; a measurement takes time, and none of theirs."""
    with log.log.track("training", Steps(10, tokens=1000)) as advance:
        log.now += 500
        advance(0, Finding("loss new 3.0000"))  # before the first step: of its time nothing is left to wait for
        log.now += 40
        advance(1)
        for _ in range(2):
            log.now += 10
            advance(1)
        log.now += 400
        advance(0, Finding("loss new 2.0000"))
        log.now += 1000
        advance(7)
    assert [line.split("  ")[2:] for line in log.lines] == [
        ["loss new 3.0000"],
        ["2 tokens/s", "6 min left"],
        ["loss new 2.0000", "10 tokens/s", "18 min left"],
        ["1 tokens/s"],
    ]


def test_time_left_is_said_in_the_unit_that_fits() -> None:
    seconds = {0.4: "0 s", 119: "119 s", 120: "2 min", 3590: "1 h 0 min", 3660: "1 h 1 min", 360_000: "100 h 0 min"}
    assert [format_left(time) for time in seconds] == list(seconds.values())


# where lines go


@contextmanager
def into_a_file(file: Path) -> Iterator[Callable[[], str]]:
    """Stderr is a file, and every report is a line."""
    with (
        pytest.MonkeyPatch.context() as patch,
        file.open("w", encoding="utf-8") as opened,
        redirect_stderr(opened),
    ):
        patch.setattr(log_lines, "INTERVAL", 0.0)
        yield lambda: file.read_text(encoding="utf-8")


@contextmanager
def onto_a_terminal() -> Iterator[Callable[[], str]]:
    """Stderr is a pseudo-terminal, and every report would be a line."""
    ours, theirs = pty.openpty()

    def shown() -> str:
        text = b""
        while select.select([ours], [], [], 0)[0]:
            text += os.read(ours, 65536)
        return text.decode()

    with (
        pytest.MonkeyPatch.context() as patch,
        os.fdopen(theirs, "w", encoding="utf-8") as screen,
        redirect_stderr(screen),
    ):
        patch.setattr(log_lines, "INTERVAL", 0.0)
        yield shown
    os.close(ours)


def use(out: Output) -> None:
    out.begin("train", "stage 1 of 2")
    with out.track("hashes", 2) as advance:
        advance(1)
        advance(1)
    out.warn("careful\nwith [this]")


def test_a_file_gets_lines_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as some schedulers and CI systems set it
    with into_a_file(tmp_path / "log") as written:
        out = Output()
        with out.track("hashes", 2) as advance:
            advance(1)
            assert written().endswith("hashes  50 %\n"), "before the work ends, and before the file is closed"
            advance(1)
        use(out)
        text = written()
    assert [TIME.sub("", line) for line in text.splitlines()] == [
        *("hashes  0 %", "hashes  50 %", "hashes  100 %", "train  stage 1 of 2"),
        *("hashes  0 %", "hashes  50 %", "hashes  100 %", "warning: careful↵with [this]"),
    ]
    assert "\x1b" not in text and "\r" not in text


@pytest.mark.parametrize(("rank", "quiet"), (("0", True), ("1", False)))
def test_quiet_and_other_processes_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str, quiet: bool
) -> None:
    with into_a_file(tmp_path / "log") as written:
        monkeypatch.setenv("RANK", rank)
        use(Output(quiet=quiet))
        assert written() == ""
        monkeypatch.setenv("RANK", "0")
        use(Output())
        assert len(written().splitlines()) == 5, "the control"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_log_that_is_full_ends_no_job() -> None:
    full = os.fdopen(os.open("/dev/full", os.O_WRONLY), "w", encoding="utf-8")
    with pytest.raises(OSError, match="No space left"):
        print("the control", file=full, flush=True)
    with redirect_stderr(full):
        use(Output())
    with suppress(OSError):
        full.close()


def test_a_terminal_draws_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    with onto_a_terminal() as shown:
        monkeypatch.setenv("TERM", "xterm")
        use(Output())
        text = shown()
        assert "\x1b[" in text and "━" in text and "warning: " in text
        assert not TIME.search(text) and "stage 1 of 2" not in text
        with Output().track("training", Steps(2, tokens=9)) as advance:
            advance(1, Finding("loss new 2.0000", kept="learning 0.500"))
            advance(1, "loss 3.000")
        text = shown()
        assert "loss 3.000  learning 0.500" in text and "loss new" not in text
        monkeypatch.setenv("TERM", "dumb")  # which cannot draw one
        use(Output())
        text = shown()
        assert "\x1b" not in text and len(TIME.findall(text)) == 4
