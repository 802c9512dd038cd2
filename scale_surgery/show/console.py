"""Print results for people and for machines. No other module prints."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.text import Text

from scale_surgery.checkpoint.files import to_json
from scale_surgery.errors import Problem
from scale_surgery.progress import Finding, Track, no_track
from scale_surgery.show.layout import NEXT, Facts, Warned, sentence
from scale_surgery.show.log_lines import LogLines
from scale_surgery.visible import visible_line, visible_text


def silence(stream: Any) -> None:
    """Send what is still written to a closed stream nowhere: whoever read it has read enough, and files are written."""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


class VisibleConsole(Console):
    """A console that shows control characters as signs. Only rich itself moves the cursor."""

    def __init__(self, *, warns: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.warns = warns

    def on_broken_pipe(self) -> None:
        """Go on without output. rich would end the program."""
        self.quiet = True
        silence(self.file)

    def render_str(self, text: str, **options: Any) -> Text:
        """Convert a string to a text, before rich drops some of its control characters."""
        return super().render_str(visible_text(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of a renderable, with control characters as signs."""
        if isinstance(renderable, Warned) and not self.warns:
            return
        for part in super().render(renderable, options):
            yield part if part.control else part._replace(text=visible_text(part.text))


class Output:
    """A pair of consoles: results on stdout, all other messages on stderr.

    Attributes:
        track: Shows the progress of long work: a bar on a terminal, lines if stderr is a file or a pipe, nothing with
            -q.
    """

    def __init__(self, *, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json, self.has_shown = as_json, False
        # a character that stdout cannot encode is escaped, as on stderr, and ends no command
        if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="backslashreplace")
        self.messages = VisibleConsole(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)
        # of several processes, only the first prints
        self.is_first = os.environ.get("RANK", "0") == "0"
        self.quiet = quiet or not self.is_first
        # a file is never drawn on, even with FORCE_COLOR; a dumb terminal cannot move the cursor
        self.draws = sys.stderr.isatty() and not self.messages.is_dumb_terminal
        self.log = LogLines(self._write_line)
        self.track: Track = no_track if self.quiet else self._bar if self.draws else self.log.track
        # without markup: a name may contain brackets
        self.results = VisibleConsole(warns=not self.quiet, highlight=False, soft_wrap=False, markup=False, emoji=False)

    def show(self, result: Any, rendered: RenderableType) -> None:
        """Print a result, rendered or as JSON."""
        if not self.is_first:
            return
        if self.as_json:
            self._print_json(to_json(result))
        else:
            # long paths are not cut
            self.results.print(rendered, crop=False)

    def show_error(self, name: str, problems: Iterable[Problem]) -> None:
        """Print an error as JSON, if --json is given and no result was printed."""
        if self.is_first and self.as_json and not self.has_shown:
            self._print_json({"error": name, "problems": [problem.to_json() for problem in problems]})

    def _print_json(self, content: Any) -> None:
        self.has_shown = True
        # json.dumps escapes non-ASCII characters and all ASCII control characters except DEL
        try:
            # a server prints it before it serves
            print(json.dumps(content, indent=2).replace("\x7f", "\\u007f"), flush=True)
        except BrokenPipeError:
            silence(sys.stdout)

    def say(self, message: RenderableType, *, as_it_is: bool = False) -> None:
        """Print a message along with the result, unless --json or -q is given.

        With `as_it_is`, lines are not wrapped.
        """
        if not (self.quiet or self.as_json):
            self.results.print(message, soft_wrap=as_it_is, crop=False)

    def stream(self, part: Text) -> None:
        """Print a piece of text without ending the line. The terminal wraps it."""
        if self.is_first and not self.as_json:
            self.results.print(part, end="", soft_wrap=True)

    def show_part(self, rendered: RenderableType) -> None:
        """Print a finished part of a result."""
        if self.is_first and not self.as_json:
            self.results.print(rendered, crop=False)

    @contextmanager
    def redrawn(self) -> Iterator[Callable[[RenderableType], None]]:
        """Yield a function that redraws in place on a terminal, and draws nothing elsewhere."""
        if self.as_json or not self.results.is_terminal:
            yield lambda rendered: None
            return
        with Live(console=self.results, auto_refresh=False, transient=True) as live:
            yield lambda rendered: live.update(rendered, refresh=True)

    def ask(self, prompt: str) -> str:
        """Read a line. A prompt is shown if the user types it."""
        if isinstance(sys.stdin, TextIOWrapper) and sys.stdin.errors != "replace":
            sys.stdin.reconfigure(errors="replace")  # input may not be valid UTF-8
        if self.as_json or not (sys.stdin.isatty() and self.results.is_terminal):
            if not (line := sys.stdin.readline()):
                raise EOFError
            return line.removesuffix("\n")
        with suppress(ImportError):
            import readline  # noqa: F401  (with it, a line can be edited, and earlier ones come back)
        return input(prompt)

    def say_file(self, done: str, *files: Path) -> None:
        """Print the names of files that were written or drawn."""
        self.say(Text("\n") + sentence(f"{done} to {' and '.join(map(str, files))}"), as_it_is=True)

    def suggest(self, command: str) -> None:
        """Print the next command to type, at the end of a result."""
        if self.is_first and not self.as_json:
            self.results.print("", Facts("", [(NEXT, command)]), sep="\n", crop=False)

    def warn(self, message: str) -> None:
        """Print a warning on stderr, on one line."""
        if self.quiet:
            return
        if self.draws:
            self.messages.print(Text("warning: ", style="yellow") + sentence(message))
        else:
            self._write_line(f"warning: {message}")

    def begin(self, stage: str, what: str) -> None:
        """Log the start of a stage of a long job. A terminal shows bars instead."""
        if not (self.quiet or self.draws):
            self.log.line(stage, what)

    def _write_line(self, line: str) -> None:
        """Write a line to a log at once. A full or closed log does not end the job."""
        with suppress(OSError):
            print(visible_line(line), file=sys.stderr, flush=True)

    def fail(self, *lines: str, trace: str = "") -> None:
        """Print an error on stderr, with its traceback if given. -q does not silence it."""
        if trace:
            self.messages.print(trace, end="")
        self.messages.print(Text("error: ", style="bold red") + Text("\n").join(map(sentence, lines)))

    @contextmanager
    def _bar(self, label: str, total: int) -> Iterator[Any]:
        """Show a progress bar on stderr, and yield the function that advances it."""
        bar = (
            TextColumn("{task.description:<14}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
        )
        columns = (*bar, TextColumn("{task.fields[note]}", markup=False))
        with Progress(*columns, console=self.messages, transient=True) as progress:
            task = progress.add_task(visible_line(label), total=max(1, total), note="")
            kept = ""

            def report(advance: int, note: str = "") -> None:
                nonlocal kept
                if isinstance(note, Finding):
                    kept, note = note.kept, ""
                shown = "  ".join(filter(None, (note, kept)))
                progress.update(task, advance=advance, note=visible_line(shown))

            yield report
