"""Figures of benchmarks/biography/layers.py, drawn from its records with matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.biography.figures import BLACK, BLUE, DOTS_PER_INCH, GREEN, GREY, PURPLE, SIZE, STYLE, VERMILION
from benchmarks.biography.layers_report import fit, norms_and_forgetting, norms_and_learning
from benchmarks.biography.pilots import Proposal
from benchmarks.biography.report import forgetting, learning
from benchmarks.biography.runs import Run

COLOURS = {"attn": GREEN, "ffn": VERMILION, "both": PURPLE}
NAMES = {"attn": "attention", "ffn": "MLP", "both": "attention and MLP"}
RATE_MARKERS = ("o", "s", "^", "D")
RING: dict[str, Any] = {
    "color": "none",
    "marker": "o",
    "markersize": 13,
    "markeredgecolor": BLUE,
    "markeredgewidth": 1.4,
}
Pairs = Mapping[tuple[int, ...], Sequence[Run]]


@contextmanager
def _figure(file: Path, panels: int = 2) -> Iterator[Sequence[Axes]]:
    """Give out the panels of a figure, and write it when they are drawn."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        yield figure.subplots(1, panels)
        figure.savefig(file, dpi=DOTS_PER_INCH)


def draw_depths(groups: Mapping[str, Mapping[int, Sequence[Run]]], folder: Path) -> Path:
    """Draw forgetting and learning against L_fp, means over seeds and their ranges; return the file."""
    file = folder / "biography-l_fp.png"
    with _figure(file) as (left, right):
        for axes, title, of in (
            (left, "forgetting, lower is better", forgetting),
            (right, "learning, higher is better", learning),
        ):
            axes.set(title=title, xlabel="L_fp, lowest layers without W12", ylabel="nats per token")
            for scope, depths in groups.items():
                _draw_range(axes, depths, of, scope)
            axes.set_xticks([*next(iter(groups.values()))])
        left.legend(frameon=False, title="W12 in", alignment="left", loc="lower left")
    return file


def _draw_range(axes: Axes, depths: Mapping[int, Sequence[Run]], of: Callable[[Run], float], scope: str) -> None:
    values = [[of(run) for run in runs] for runs in depths.values()]
    axes.fill_between([*depths], [*map(min, values)], [*map(max, values)], color=COLOURS[scope], alpha=0.15)
    axes.plot([*depths], [*map(fmean, values)], color=COLOURS[scope], marker="o", markersize=5, label=NAMES[scope])


def draw_norms(groups: Mapping[str, Sequence[Run]], folder: Path) -> Path:
    """Draw forgetting and learning against the norm of W12 at every measured step; return the file."""
    file = folder / "biography-norm.png"
    with _figure(file) as (left, right):
        panels = ((left, "forgetting", norms_and_forgetting), (right, "learning", norms_and_learning))
        for axes, title, points_of in panels:
            axes.set(
                title=f"{title} along every run", xlabel="norm of W12, mean over its layers", ylabel="nats per token"
            )
            for scope, runs in groups.items():
                _draw_points(axes, scope, runs, points_of)
        for scope, runs in groups.items():
            _draw_line(left, scope, norms_and_forgetting(runs))
        left.legend(frameon=False, fontsize=8)
        rates = sorted({run.rate for runs in groups.values() for run in runs})
        for rate, marker in zip(rates, RATE_MARKERS, strict=False):
            right.plot([], [], linestyle="none", marker=marker, color=GREY, label=f"rate {rate:g}")
        right.legend(frameon=False, fontsize=8)
    return file


def _draw_points(
    axes: Axes, scope: str, runs: Sequence[Run], points_of: Callable[..., list[tuple[float, float]]]
) -> None:
    rates = sorted({run.rate for run in runs})
    for run in runs:
        marker = RATE_MARKERS[rates.index(run.rate)]
        x, y = zip(*points_of([run]), strict=True)
        axes.plot(x, y, color=COLOURS[scope], marker=marker, markersize=4, linewidth=0.5, alpha=0.6)
        axes.plot(x[-1], y[-1], color=COLOURS[scope], marker=marker, markersize=7, markeredgecolor="white")


def _draw_line(axes: Axes, scope: str, points: Sequence[tuple[float, float]]) -> None:
    line, reach = fit(points), max(x for x, _ in points)
    ends = [line.intercept, line.intercept + line.slope * reach]
    label = f"{NAMES[scope]}, r² {line.r_squared:.2f}"
    axes.plot([0, reach], ends, color=COLOURS[scope], linestyle="--", linewidth=1.4, label=label)


def draw_pairs(groups: Mapping[str, Pairs], proposals: Sequence[Proposal], folder: Path) -> Path:
    """Draw forgetting against learning for every pair of layers, in rings what pilots change most; return the file."""
    file = folder / "biography-chosen.png"
    with _figure(file, len(groups)) as panels:
        for axes, (name, pairs) in zip(panels, groups.items(), strict=True):
            axes.set(title=name, xlabel="learning, nats per token", ylabel="forgetting, nats per token")
            for pair, runs in pairs.items():
                _draw_pair(axes, pair, runs)
            for pair in {proposal.pair for proposal in proposals}:
                axes.plot(*_middle(pairs[pair]), **RING)
            axes.invert_yaxis()  # so that better is up and right
            axes.margins(0.15)
            axes.xaxis.set_major_locator(MaxNLocator(5))
        panels[0].plot([], [], **RING | {"markersize": 8}, linestyle="none", label="most changed by a pilot")
        panels[0].legend(frameon=False, fontsize=8)
    return file


def _draw_pair(axes: Axes, pair: tuple[int, ...], runs: Sequence[Run]) -> None:
    for run in runs:
        axes.plot(learning(run), forgetting(run), color=GREY, marker="o", markersize=3, alpha=0.6)
    place = _middle(runs)
    axes.plot(*place, color=BLACK, marker="o", markersize=6)
    axes.annotate(",".join(map(str, pair)), place, (8, 6), textcoords="offset points")


def _middle(runs: Sequence[Run]) -> tuple[float, float]:
    return fmean(map(learning, runs)), fmean(map(forgetting, runs))
