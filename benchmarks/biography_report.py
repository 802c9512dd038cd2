"""What the records of benchmarks/biography.py say: means and ranges over seeds, as tables."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from benchmarks.biography_runs import Run

MATCHED = 0.9  # accuracy on Task 1 at which accuracies on Task 0 are compared


@dataclass(frozen=True)
class Spread:
    """Mean and range of a measure over seeds."""

    mean: float
    low: float
    high: float


def forgetting(run: Run) -> float:
    """How much the loss on old texts has grown, nats per token; the base's is that of step 0."""
    return run.end.old_loss - run.points[0].old_loss


def learning(run: Run) -> float:
    """How much the loss on new texts has fallen, nats per token."""
    return run.points[0].new_loss - run.end.new_loss


def matched_accuracy(run: Run, level: float = MATCHED) -> float | None:
    """Task 0 accuracy in percent when Task 1 first reaches a level, or None where it never does.

    Between two measured points both are taken to change in proportion.
    """
    for before, after in itertools.pairwise(run.points):
        if after.new_accuracy >= level > before.new_accuracy:
            share = (level - before.new_accuracy) / (after.new_accuracy - before.new_accuracy)
            return 100 * (before.old_accuracy + share * (after.old_accuracy - before.old_accuracy))
    return None


@dataclass(frozen=True)
class Measure:
    """One column of the table."""

    name: str
    of: Callable[[Run], float | None]
    digits: int


MEASURES = (
    Measure("Task 1 %", lambda run: 100 * run.end.new_accuracy, 1),
    Measure("Task 0 %", lambda run: 100 * run.end.old_accuracy, 1),
    Measure("matched", matched_accuracy, 1),
    Measure("forgets", forgetting, 2),
    Measure("learns", learning, 2),
)
LEGEND = f"""\
Means, and ranges over seeds below them. Task 1: new people, Task 0: old people,
matched: Task 0 % when Task 1 first reaches {MATCHED:.0%}; forgets, learns: growth of
the loss on old texts and fall of that on new ones, in nats per token."""


def spread(values: Iterable[float | None]) -> Spread | None:
    """Summarise the values of all seeds; None where a seed has none."""
    found = list(values)
    known = [value for value in found if value is not None]
    if len(known) < len(found):
        return None
    return Spread(sum(known) / len(known), min(known), max(known))


def render(groups: Mapping[str, Sequence[Run]]) -> Table:
    """Lay runs out as a table, a line for each group of seeds: means, and ranges below them."""
    table = Table("", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for column in ("trained", "rate", *(measure.name for measure in MEASURES)):
        table.add_column(column, justify="right")
    for name, runs in groups.items():
        cells = [_cell(spread(map(measure.of, runs)), measure.digits) for measure in MEASURES]
        table.add_row(name, f"{runs[0].parameters:,}", f"{runs[0].rate:g}", *cells)
    return table


def _cell(found: Spread | None, digits: int) -> Text:
    if found is None:
        return Text("–")
    mean, low, high = (f"{value:.{digits}f}" for value in (found.mean, found.low, found.high))
    return Text(mean).append(f"\n{low}–{high}", style="dim")
