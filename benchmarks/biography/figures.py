"""Figures of benchmarks/biography/compare.py, drawn from its records with matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import fmean

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.biography.report import FORGETTING_LIMIT
from benchmarks.biography.runs import Point, Run

DOTS_PER_INCH = 150
SIZE = (8, 4.4)
STYLE = {
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#999999",
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.labelcolor": "#333333",
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "axes.grid": True,
    "grid.color": "#ebebeb",
}


@dataclass(frozen=True)
class Look:
    """How one method is drawn."""

    colour: str
    marker: str = "o"
    is_hollow: bool = False

    @property
    def fill(self) -> str:
        """Colour inside the mark."""
        return "white" if self.is_hollow else self.colour

    @property
    def edge(self) -> str:
        """Colour around the mark."""
        return self.colour if self.is_hollow else "white"


# colours of Okabe and Ito, which colour-blind readers tell apart too, purple darker for text; a family shares one
BLACK, GREY, ORANGE, VERMILION = "#000000", "#767676", "#E69F00", "#D55E00"
BLUE, GREEN, PURPLE, BROWN = "#0072B2", "#009E73", "#B8578F", "#8A5A2B"
LOOKS = {
    "full": Look(BLACK),
    "freeze": Look(GREY),
    "LoRA": Look(ORANGE),
    "PiSSA": Look(VERMILION),
    "preserve": Look(BLUE),
    "adapt attn 0": Look(GREEN, "^"),
    "adapt attn 2": Look(GREEN, "s"),
    "adapt attn 3": Look(GREEN, "D"),
    "adapt both 0": Look(PURPLE, "^"),
    "adapt both 2": Look(PURPLE, "s"),
    "adapt both 3": Look(PURPLE, "D"),
    "grow-freeze": Look(BROWN, "v"),
    "grow-train": Look(BROWN, "v", is_hollow=True),
    "depth": Look(VERMILION, "P"),
    "both 3 cosine": Look(VERMILION, "D"),
    "both 3 cosine, trained": Look(VERMILION, "D", is_hollow=True),
    "both 3 posterior": Look(GREEN, "D"),
    "both 3 posterior, trained": Look(GREEN, "D", is_hollow=True),
    "both 0 posterior": Look(GREEN, "^"),
    "preserve posterior": Look(GREEN),
    "preserve posterior, trained": Look(GREEN, is_hollow=True),
    "0, random": Look(GREY),
    "random, 0": Look(ORANGE),
    "0, svd": Look(VERMILION),
    "svd, 0": Look(BLUE),
}

Groups = Mapping[str, Sequence[Run]]


@dataclass(frozen=True)
class Axis:
    """One coordinate of a measured point, and what it is called."""

    label: str
    of: Callable[[Point], float]


STEPS = Axis("steps", lambda point: point.step)
NEW_ACCURACY = Axis("new people (Task 1), %", lambda point: 100 * point.new_accuracy)
OLD_ACCURACY = Axis("old people (Task 0), %", lambda point: 100 * point.old_accuracy)
NEW_LOSS = Axis("new people's texts, nats per token", lambda point: point.new_loss)
COSINE = Axis("cosine with the base model's", lambda point: nan if point.cosine is None else point.cosine)
OLD_LOSS = Axis("old people's texts, nats per token", lambda point: point.old_loss)


def draw(figure: str, groups: Groups, folder: Path) -> Path:
    """Draw one figure of runs with several seeds, by name, as a PNG in a folder."""
    file = folder / ("biography.png" if figure == "methods" else f"biography-{figure}.png")
    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=SIZE, layout="constrained")
        drawn.get_layout_engine().set(wspace=0.05)
        DRAWINGS[figure](drawn, groups)
        drawn.savefig(file, dpi=DOTS_PER_INCH)
    return file


def _draw_methods(figure: Figure, groups: Groups) -> None:
    _draw_both(figure, groups)
    add_legend(figure, groups)


def _draw_routed(figure: Figure, groups: Groups) -> None:
    """Draw as the other methods, and how much may be forgotten."""
    axes = _draw_both(figure, groups)
    limit = next(iter(groups.values()))[0].points[0].old_loss + FORGETTING_LIMIT
    label = f"base + {FORGETTING_LIMIT:g} nats"
    add_legend(figure, groups, axes.axhline(limit, color=BLACK, linestyle=":", linewidth=1, label=label))


def _draw_both(figure: Figure, groups: Groups) -> Axes:
    """Draw accuracies on the way and losses at the end; return the panel of losses."""
    left, right = figure.subplots(1, 2)
    frame(left, "accuracy, every curve from top left", NEW_ACCURACY, OLD_ACCURACY)
    _draw_paths(left, groups, NEW_ACCURACY, OLD_ACCURACY)
    frame(right, "loss at the end, better is up and right", NEW_LOSS, OLD_LOSS)
    _draw_ends(right, groups, NEW_LOSS, OLD_LOSS)
    return right


def add_legend(figure: Figure, groups: Groups, *more: Line2D) -> None:
    """Name the groups, and what else is drawn, beside the panels."""
    marks = [mark_end(figure.axes[0], (nan, nan), LOOKS[name], 7, name) for name in groups]
    figure.legend(handles=[*marks, *more], loc="outside right center", frameon=False, labelspacing=0.9)


def _draw_stream(figure: Figure, groups: Groups) -> None:
    """Draw how far the base stream turns, and what is forgotten, over steps."""
    left, right = figure.subplots(1, 2)
    frame(left, "base stream, higher is closer to the base", STEPS, COSINE)
    draw_courses(left, groups, COSINE)
    frame(right, "forgetting, lower is better", STEPS, OLD_LOSS)
    draw_courses(right, groups, OLD_LOSS)
    add_legend(figure, groups)


def _draw_inits(figure: Figure, groups: Groups) -> None:
    left, right = figure.subplots(1, 2)
    for axes, title, axis in ((left, "learning", NEW_LOSS), (right, "forgetting", OLD_LOSS)):
        frame(axes, f"{title}, lower is better", STEPS, axis)
        draw_courses(axes, groups, axis)
    add_legend(figure, groups)


DRAWINGS: dict[str, Callable[[Figure, Groups], None]] = {
    "methods": _draw_methods,
    "growing": _draw_methods,
    "stream": _draw_stream,
    "inits": _draw_inits,
    "routed": _draw_routed,
}


def frame(axes: Axes, title: str, x: Axis, y: Axis) -> None:
    """Name a panel and its axes."""
    axes.set(title=title, xlabel=x.label, ylabel=y.label)
    axes.set_axisbelow(True)


def _draw_paths(axes: Axes, groups: Groups, x: Axis, y: Axis) -> None:
    """Draw the mean of each group from step to step."""
    axes.set(xlim=(0, 102), ylim=(0, 102))
    for name, runs in groups.items():
        path, look = _mean_path(runs, x, y), LOOKS[name]
        axes.plot(*zip(*path, strict=True), color=look.colour, marker=look.marker, markersize=3, linewidth=1.3)
        mark_end(axes, path[-1], look, 6.5)


def _draw_ends(axes: Axes, groups: Groups, x: Axis, y: Axis) -> None:
    """Draw the end of each run, and the mean of each group larger."""
    for name, runs in groups.items():
        look = LOOKS[name]
        for run in runs:
            place = x.of(run.end), y.of(run.end)
            axes.plot(*place, color=look.colour, marker=look.marker, markersize=3, alpha=0.6)
        mark_end(axes, _mean_path(runs, x, y)[-1], look, 8)
    # so that better is up and right, as in the other panel
    axes.invert_xaxis()
    axes.invert_yaxis()


def mark_end(axes: Axes, place: tuple[float, float], look: Look, size: float, name: str | None = None) -> Line2D:
    """Draw one large mark; a name puts it into a legend."""
    style = {"marker": look.marker, "markersize": size, "color": look.fill, "markeredgecolor": look.edge}
    (mark,) = axes.plot(*place, linestyle="none", label=name, **style)
    return mark


def draw_courses(axes: Axes, groups: Groups, y: Axis) -> None:
    """Draw the mean of each group over steps, with the range of its seeds."""
    for name, runs in groups.items():
        path, look = _mean_path(runs, STEPS, y), LOOKS[name]
        steps, means = zip(*path, strict=True)
        measured = [[y.of(point) for point in points] for points in zip(*(run.points for run in runs), strict=True)]
        axes.fill_between(steps, [*map(min, measured)], [*map(max, measured)], color=look.colour, alpha=0.15)
        axes.plot(steps, means, color=look.colour, marker=look.marker, markersize=3.5, linewidth=1.3)
    axes.set_xlim(0)


def _mean_path(runs: Sequence[Run], x: Axis, y: Axis) -> list[tuple[float, float]]:
    measured = zip(*(run.points for run in runs), strict=True)
    return [(fmean(map(x.of, points)), fmean(map(y.of, points))) for points in measured]
