"""A command as somebody types it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from threading import Event, Thread

from click.testing import CliRunner, Result

from scale_surgery.cli.program import main


def run(*words: object, code: int = 0, input: str | None = None) -> Result:
    """Run `scale-surgery` with these words in a terminal of 80 columns; its exit code has to be this one."""
    result = CliRunner(env={"COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1"}).invoke(
        main, list(map(str, words)), input=input
    )
    assert result.exit_code == code, result.output
    return result


def run_logged(log: Path, *words: object, code: int = 0) -> str:
    """Run `scale-surgery` with stderr at the end of a file; gives its stdout."""
    ended, printed = 0, StringIO()
    with log.open("a", encoding="utf-8") as file, redirect_stderr(file), redirect_stdout(printed):
        try:
            main.main(list(map(str, words)), "scale-surgery", standalone_mode=False)
        except SystemExit as end:
            ended = int(end.code or 0)
    assert ended == code, log.read_text(encoding="utf-8")
    return printed.getvalue()


@contextmanager
def terminated_at(log: Path, line: str) -> Iterator[None]:
    """End the command inside a `with` block as a scheduler does, as soon as its log has a line with this text."""
    before, over = signal.signal(signal.SIGTERM, lambda *_: None), Event()

    def watch() -> None:
        while not over.wait(0.01):
            if log.is_file() and line in log.read_text(encoding="utf-8"):
                return os.kill(os.getpid(), signal.SIGTERM)

    watcher = Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        signal.signal(signal.SIGTERM, before)
