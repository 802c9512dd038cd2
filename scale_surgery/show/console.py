"""Results for people and for machines: the only module that prints. What tables look like stands in `tables`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text


class Output:
    """Where results and messages go: results on stdout, everything else on stderr."""

    def __init__(self, *, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json = as_json
        # without markup: a name may hold brackets
        self.results = Console(highlight=False, soft_wrap=False, markup=False)
        self.messages = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
        # of several processes that a launcher started, the first one speaks
        self.is_first = os.environ.get("RANK", "0") == "0"
        self.quiet = quiet or not self.is_first

    def show(self, result: Any, rendered: RenderableType) -> None:
        """Print a result, as JSON or as it was rendered."""
        if not self.is_first:
            return
        if self.as_json:
            sys.stdout.write(json.dumps(to_json(result), indent=2) + "\n")
        else:
            self.results.print(rendered)

    def say(self, message: RenderableType, *, as_it_is: bool = False) -> None:
        """Print something beside the result, where it does not disturb it; `as_it_is` leaves long lines long."""
        if not (self.quiet or self.as_json):
            self.results.print(message, soft_wrap=as_it_is)

    def warn(self, message: str) -> None:
        """Print a warning on stderr, where it is a terminal: what a script must know stands in the result."""
        if self.messages.is_terminal and not self.quiet:
            self.messages.print(Text("warning: ", style="yellow") + Text(message))

    def fail(self, message: str) -> None:
        """Print an error on stderr; never silenced."""
        self.messages.print(Text("error: ", style="bold red") + Text(message))

    @contextmanager
    def track(self, label: str, total: int) -> Iterator[Any]:
        """Show a progress bar on stderr, where it is a terminal, and give a function that advances it."""
        bar = (TextColumn("{task.description:<14}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        columns = (*bar, TextColumn("{task.fields[note]}", markup=False))
        hidden = self.quiet or not self.messages.is_terminal
        with Progress(*columns, console=self.messages, transient=True, disable=hidden) as progress:
            task = progress.add_task(label, total=max(1, total), note="")
            yield lambda advance, note="": progress.update(task, advance=advance, note=note)


def to_json(result: Any) -> Any:
    """A result as plain JSON values."""
    if hasattr(result, "to_json"):
        return result.to_json()
    content = asdict(result) if is_dataclass(result) and not isinstance(result, type) else result
    return json.loads(json.dumps(content, default=str))
