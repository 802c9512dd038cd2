"""What the records of benchmarks/biography/compare.py say: means and ranges over seeds, as tables."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from benchmarks.biography.methods import ROUTED
from benchmarks.biography.runs import Run

FORGETTING_LIMIT = 0.02  # nats per token, what a routed method may forget
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
    """Task 0 accuracy in percent when Task 1 first reaches a level, or None where it never does."""
    for before, after in itertools.pairwise(run.points):
        if after.new_accuracy >= level > before.new_accuracy:
            # between two measured points both are taken to change in proportion
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
STREAM_MEASURES = (
    Measure("cosine", lambda run: run.end.cosine, 3),
    Measure("lowest", lambda run: min(point.cosine or 0.0 for point in run.points), 3),
    *MEASURES[-2:],
)
LEGEND = f"""\
Means, and ranges over seeds below them. Task 1: new people, Task 0: old people,
matched: Task 0 % when Task 1 first reaches {MATCHED:.0%}; forgets, learns: growth of
the loss on old texts and fall of that on new ones, in nats per token."""
STREAM_LEGEND = """\
Means, and ranges over seeds below them. cosine: of the base stream that enters
the final norm and the base model's, on old texts, at the end; lowest: at any
measured step."""


def spread(values: Iterable[float | None]) -> Spread | None:
    """Summarise the values of all seeds; None where a seed has none."""
    all_values = list(values)
    known = [value for value in all_values if value is not None]
    if len(known) < len(all_values):
        return None
    return Spread(sum(known) / len(known), min(known), max(known))


def render(groups: Mapping[str, Sequence[Run]], figure: str = "methods") -> Table:
    """Lay runs out as a table, a line for each group of seeds: means, and ranges below them."""
    measures, with_sizes = STREAM_MEASURES if figure == "stream" else MEASURES, figure != "routed"
    table = Table("", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for column in (*(["trained"] if with_sizes else []), "rate", *(measure.name for measure in measures)):
        table.add_column(column, justify="right")
    for name, runs in groups.items():
        sizes = [f"{runs[0].parameters:,}"] if with_sizes else []
        cells = [cell(spread(map(measure.of, runs)), measure.digits) for measure in measures]
        table.add_row(name, *sizes, f"{runs[0].rate:g}", *cells)
    return table


def cell(summary: Spread | None, digits: int) -> Text:
    """Write a mean, and the range below it."""
    if summary is None:
        return Text("–")
    return Text(f"{summary.mean:.{digits}f}").append(f"\n{_range(summary, digits)}", style="dim")


def _range(summary: Spread, digits: int) -> str:
    """The lowest and the highest value; 100 without a point, so that a range of percentages stays narrow."""
    return "–".join(f"{value:.{digits}f}".replace("100.0", "100") for value in (summary.low, summary.high))


@dataclass(frozen=True)
class Target:
    """What a routed method should reach.

    Attributes:
        name: Head of a column.
        of: Takes the routed run, and the run of the same seed without a router.
        bound: What is to be reached, or not to be exceeded.
        is_least: Whether more is better.
        digits: Shown after the point.
    """

    name: str
    of: Callable[[Run, Run], float]
    bound: float
    is_least: bool
    digits: int

    @property
    def head(self) -> str:
        """The name with the bound."""
        return f"{self.name}\n{'≥' if self.is_least else '≤'} {self.bound:g}"

    def is_met(self, value: float) -> bool:
        """Whether a value is as good as the bound."""
        return value >= self.bound if self.is_least else value <= self.bound


def share_of_base(run: Run) -> float:
    """Task 0 accuracy as a percentage of the base's, which is that of step 0."""
    return 100 * run.end.old_accuracy / run.points[0].old_accuracy


TARGETS = (
    Target("Task 0\n% of base", lambda run, unrouted: share_of_base(run), 99, is_least=True, digits=1),
    Target(
        "Task 1\n% of unrouted",
        lambda run, unrouted: 100 * run.end.new_accuracy / unrouted.end.new_accuracy,
        98,
        is_least=True,
        digits=1,
    ),
    Target(
        "forgets\nnats per token", lambda run, unrouted: forgetting(run), FORGETTING_LIMIT, is_least=False, digits=4
    ),
    Target(
        "learns\n% of unrouted",
        lambda run, unrouted: 100 * learning(run) / learning(unrouted),
        95,
        is_least=True,
        digits=1,
    ),
)
TARGETS_LEGEND = """\
Unrouted: the same expansion without a router, same seed. A mean that meets its
target has a +, one that does not a -."""


def render_targets(groups: Mapping[str, Sequence[Run]]) -> Table:
    """Compare routed methods with the base and with what the same expansion reaches without a router."""
    table = Table("", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for target in TARGETS:
        table.add_column(target.head, justify="right")
    for method in ROUTED:
        if method.unrouted is not None and method.name in groups:
            pairs = list(zip(groups[method.name], groups[method.unrouted], strict=True))
            table.add_row(method.name, *(_judge(target, pairs) for target in TARGETS))
    return table


def _judge(target: Target, pairs: Sequence[tuple[Run, Run]]) -> Text:
    summary = spread(target.of(*pair) for pair in pairs)
    if summary is None:
        return Text("–")
    is_met = target.is_met(summary.mean)
    mark = Text(" +" if is_met else " -", style="green" if is_met else "red")
    mean = Text(f"{summary.mean:.{target.digits}f}").append(mark)
    return mean.append(f"\n{_range(summary, target.digits)}  ", style="dim")
