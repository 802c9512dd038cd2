"""What the records of benchmarks/biography/layers.py say, as tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import correlation, fmean, linear_regression

from rich import box
from rich.table import Table

from benchmarks.biography.pilots import Proposal
from benchmarks.biography.report import cell, forgetting, learning, matched_accuracy, spread
from benchmarks.biography.runs import Run

DEPTHS_LEGEND = """\
Means, and ranges over seeds below them. W12 in attention (attn), or in
attention and MLP (both), of the layers from L_fp on. ppl: perplexity per token
of old and of new texts; the base's is {old:.2f} and {new:.2f}."""
NORM_LEGEND = """\
norm: Frobenius norm of all W12 of a layer, mean over the layers that have any;
forgets: nats per token; both at the end, means over seeds. Below, straight
lines through all measured steps but the first, of all runs."""
CHOSEN_LEGEND = """\
Means, and ranges over seeds below them. matched: Task 0 % when Task 1 first
reaches 90%. changed: at how many seeds the pilot changes the pair most."""


@dataclass(frozen=True)
class Line:
    """A straight line through points, and the share of their variance that it explains."""

    slope: float
    intercept: float
    r_squared: float
    points: int


def fit(points: Sequence[tuple[float, float]]) -> Line:
    """Fit a line by least squares."""
    x, y = zip(*points, strict=True)
    slope, intercept = linear_regression(x, y)
    return Line(slope, intercept, correlation(x, y) ** 2, len(points))


def norms_and_forgetting(runs: Sequence[Run]) -> list[tuple[float, float]]:
    """Norm of W12 and forgetting at every measured step but the first, where both are zero."""
    return [
        (point.w12_norm, point.old_loss - run.points[0].old_loss)
        for run in runs
        for point in run.points[1:]
        if point.w12_norm is not None
    ]


def norms_and_learning(runs: Sequence[Run]) -> list[tuple[float, float]]:
    """The same with learning."""
    return [
        (point.w12_norm, run.points[0].new_loss - point.new_loss)
        for run in runs
        for point in run.points[1:]
        if point.w12_norm is not None
    ]


def render_depths(groups: Mapping[str, Mapping[int, Sequence[Run]]]) -> Table:
    """Lay out every L_fp: what is forgotten, what is learned."""
    table = _table("W12 in", "L_fp", "trained", "forgets", "old ppl", "learns", "new ppl", "Task 0 %", "Task 1 %")
    for scope, depths in groups.items():
        for depth, runs in depths.items():
            table.add_row(
                scope,
                str(depth),
                f"{runs[0].parameters:,}",
                cell(spread(map(forgetting, runs)), 3),
                f"{fmean(math.exp(run.end.old_loss) for run in runs):.2f}",
                cell(spread(map(learning, runs)), 3),
                f"{fmean(math.exp(run.end.new_loss) for run in runs):.2f}",
                cell(spread(100 * run.end.old_accuracy for run in runs), 1),
                cell(spread(100 * run.end.new_accuracy for run in runs), 1),
            )
    return table


def depths_legend(groups: Mapping[str, Mapping[int, Sequence[Run]]]) -> str:
    """Explain the table, with the base's perplexities."""
    start = next(iter(next(iter(groups.values())).values()))[0].points[0]
    return DEPTHS_LEGEND.format(old=math.exp(start.old_loss), new=math.exp(start.new_loss))


def render_norms(groups: Mapping[str, Sequence[Run]]) -> Table:
    """Lay out norms of W12 and forgetting at the end, for each rate."""
    table = _table("W12 in", "rate", "norm", "forgets", "learns", "Task 0 %", "Task 1 %")
    for scope, runs in groups.items():
        for rate in sorted({run.rate for run in runs}):
            same = [run for run in runs if run.rate == rate]
            table.add_row(
                scope,
                f"{rate:g}",
                f"{fmean(run.end.w12_norm or 0 for run in same):.2f}",
                cell(spread(map(forgetting, same)), 3),
                cell(spread(map(learning, same)), 3),
                cell(spread(100 * run.end.old_accuracy for run in same), 1),
                cell(spread(100 * run.end.new_accuracy for run in same), 1),
            )
    return table


def render_lines(groups: Mapping[str, Sequence[Run]]) -> Table:
    """Lay out the lines of forgetting against the norm of W12, of all rates together and of each."""
    table = _table("W12 in", "rate", "points", "nats for 1 of norm", "r²")
    for scope, runs in groups.items():
        chosen = {f"{rate:g}": [run for run in runs if run.rate == rate] for rate in sorted({run.rate for run in runs})}
        for name, same in {"all": runs, **chosen}.items():
            _add_line(table, scope, name, fit(norms_and_forgetting(same)))
    everything = [run for runs in groups.values() for run in runs]
    _add_line(table, " and ".join(groups), "all", fit(norms_and_forgetting(everything)))
    return table


def _add_line(table: Table, scope: str, rate: str, line: Line) -> None:
    table.add_row(scope, rate, str(line.points), f"{line.slope:+.3f}", f"{line.r_squared:.2f}")


def render_pairs(groups: Mapping[tuple[int, ...], Sequence[Run]], proposals: Sequence[Proposal]) -> Table:
    """Lay out every pair of layers, and which a pilot changes most."""
    table = _table("layers", "trained", "forgets", "learns", "Task 0 %", "Task 1 %", "matched", "changed")
    for pair, runs in groups.items():
        votes = sum(proposal.pair == pair for proposal in proposals)
        table.add_row(
            ", ".join(map(str, pair)),
            f"{runs[0].parameters:,}",
            cell(spread(map(forgetting, runs)), 3),
            cell(spread(map(learning, runs)), 3),
            cell(spread(100 * run.end.old_accuracy for run in runs), 1),
            cell(spread(100 * run.end.new_accuracy for run in runs), 1),
            cell(spread(map(matched_accuracy, runs)), 1),
            str(votes or ""),
        )
    return table


def render_proposals(proposals: Sequence[Proposal]) -> Table:
    """Lay out how much the pilots changed each layer, by seed, and which layers are tied."""
    table = _table("pilot", *(f"layer {layer}" for layer in range(len(proposals[0].changes))), "tied")
    for proposal in proposals:
        changes = (f"{change:.2%}" for change in proposal.changes)
        table.add_row(f"seed {proposal.seed}", *changes, ", ".join(map(str, proposal.tied)))
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(first, box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for name in others:
        table.add_column(name, justify="right")
    return table
