"""The stability-plasticity plane: loss on old text against loss on new text, a numbered point per model."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery.drawing.figures import save_figure, tidy
from scale_surgery.drawing.palette import BLUE, GREY, INK, VERMILION
from scale_surgery.errors import DataError, Problem

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from scale_surgery.evidence.evaluate import Evaluation
    from scale_surgery.evidence.evaluate_models import Score

# in inches; each legend row adds ROW to the height
WIDTH, HEIGHT, ROW = 6.4, 4.2, 0.17
# longer names are listed in one column
SHORT_NAME = 40
# colour-blind-safe colours (Okabe and Ito); shapes repeat the distinction
MARKERS: dict[str, dict[str, Any]] = {
    "base": {"marker": "*", "s": 190, "color": INK, "zorder": 4},
    "expanded": {"marker": "o", "s": 70, "color": BLUE, "zorder": 3},
    "adapt": {"marker": "^", "s": 70, "color": "#CC79A7", "zorder": 3},
    "strength": {"marker": "o", "s": 30, "color": BLUE, "zorder": 3},
    "path": {"marker": "D", "s": 50, "color": "#E69F00", "zorder": 3},
    "disabled": {"marker": "o", "s": 330, "facecolor": "none", "edgecolor": "#009E73", "linewidth": 1.6, "zorder": 2},
    "other": {"marker": "s", "s": 60, "color": VERMILION, "zorder": 3},
}
# margin on each side, as a share of the range; the numbers of points need it
MARGIN = 0.15
# models within these shares of the plane share one label
NEAR = (0.04, 0.05)
# most characters in a line of a label
LINE_WIDTH = 12
NUMBERS: dict[str, Any] = {
    "textcoords": "offset points",
    "verticalalignment": "bottom",
    "fontsize": 9,
    "color": INK,
    "zorder": 5,
}
GUIDE: dict[str, Any] = {"color": GREY, "linewidth": 0.9, "linestyle": (0, (2, 3)), "zorder": 1}
CURVE: dict[str, Any] = {"color": BLUE, "linewidth": 1.0, "zorder": 2}
ARROW = {"arrowstyle": "->", "color": "#B0B0B0", "linewidth": 1.0, "shrinkA": 9, "shrinkB": 6}


@dataclass(frozen=True)
class Point:
    """A model in the plane: its number, its losses in nats per token, and its score."""

    number: int
    old: float
    new: float
    score: Score

    @property
    def place(self) -> tuple[float, float]:
        """The coordinates."""
        return self.old, self.new


def plot_plane(evaluation: Evaluation, file: Path) -> None:
    """Draw loss on old text against loss on new text into a PNG or SVG file, a point per model."""
    save_figure(plane_figure(evaluation.scores), file)


def plane_figure(scores: Iterable[Score]) -> Figure:
    """Return the figure of `plot_plane`. Models with a non-finite loss are omitted."""
    from matplotlib.figure import Figure

    points = _points(scores)
    if not points:
        raise DataError(Problem("plane-without-side"))
    columns = 2 if max(len(point.score.name) for point in points) <= SHORT_NAME else 1
    figure = Figure(figsize=(WIDTH, HEIGHT + ROW * math.ceil(len(points) / columns)), layout="constrained")
    axes = figure.subplots()
    width, height = _set_limits(axes, [point.place for point in points])
    groups = _groups(points, NEAR[0] * width, NEAR[1] * height)
    axes.set_xlabel("loss on old text, nats per token (forgets \N{RIGHTWARDS ARROW})")
    axes.set_ylabel("loss on new text, nats per token (\N{LEFTWARDS ARROW} learns)")
    tidy(axes)
    _draw_points(axes, points)
    for curve in _curves(points):
        axes.plot([point.old for point in curve], [point.new for point in curve], **CURVE)
    for start, end in _moves(groups):
        axes.annotate("", end.place, start.place, arrowprops=ARROW, zorder=1)
    _write_numbers(axes, groups)
    legend = figure.legend(loc="outside lower left", ncols=columns, frameon=False, fontsize=8, markerscale=0.65)
    for text in legend.get_texts():
        # names may contain $, which starts a formula in matplotlib
        text.set_parse_math(False)
    return figure


def _points(scores: Iterable[Score]) -> list[Point]:
    """Return the models with two finite losses, numbered in order."""
    places = [
        (score.old.nats_per_token, score.new.nats_per_token, score)
        for score in scores
        if score.old is not None and score.new is not None
    ]
    finite = [place for place in places if math.isfinite(place[0]) and math.isfinite(place[1])]
    return [Point(number, *place) for number, place in enumerate(finite, start=1)]


def _set_limits(axes: Axes, places: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Set the limits with room for labels, and return width and height."""
    (left, right), (bottom, top) = (_limits(values) for values in zip(*places, strict=True))
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)
    return right - left, top - bottom


def _limits(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    # small differences are not magnified
    spread = max(high - low, 0.05 * high, 1e-3)
    middle, half = (low + high) / 2, spread * (0.5 + MARGIN)
    # no loss is negative
    return max(middle - half, -0.04 * spread), middle + half


def _groups(points: Sequence[Point], old_reach: float, new_reach: float) -> list[list[Point]]:
    """Group the models that are near the first of their group."""
    groups: list[list[Point]] = []
    for point in points:
        near = [
            group
            for group in groups
            if abs(group[0].old - point.old) <= old_reach and abs(group[0].new - point.new) <= new_reach
        ]
        if near:
            near[0].append(point)
        else:
            groups.append([point])
    return groups


def _draw_points(axes: Axes, points: Sequence[Point]) -> None:
    for point in points:
        label = f"{point.number}  {point.score.name}"
        axes.scatter(point.old, point.new, label=label, **MARKERS[point.score.kind])
    bases = {point.score.base for point in points}
    for point in points:
        if point.score.name in bases:
            axes.axvline(point.old, **GUIDE)
            axes.axhline(point.new, **GUIDE)


def _moves(groups: Sequence[Sequence[Point]]) -> Iterator[tuple[Point, Point]]:
    """Yield the pairs of base and model whose points are far apart."""
    where = {point.score.name: (point, group) for group in groups for point in group}
    for group in groups:
        for point in group:
            if point.score.kind == "strength":
                continue  # a curve joins them
            start, base_group = where.get(point.score.base or "", (point, group))
            if base_group is not group:
                yield start, point


def _curves(points: Sequence[Point]) -> list[list[Point]]:
    """List the points of each expansion at its strengths, in their order."""
    curves: dict[str, list[Point]] = {}
    for point in points:
        if point.score.strength is not None:
            curves.setdefault(point.score.name.rpartition(", strength ")[0], []).append(point)
    return [sorted(curve, key=lambda point: point.score.strength or 0) for curve in curves.values()]


def _write_numbers(axes: Axes, groups: Sequence[Sequence[Point]]) -> None:
    from matplotlib.patheffects import withStroke

    for group in groups:
        numbers = textwrap.fill(", ".join(str(point.number) for point in group), LINE_WIDTH)
        # a thin white outline keeps the curves below visible
        outline = withStroke(linewidth=2.5, foreground="white")
        axes.annotate(numbers, group[0].place, (7, 6), path_effects=[outline], **NUMBERS)
