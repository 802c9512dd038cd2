"""The stability-plasticity plane: loss on old text against loss on new text, a labelled point for each model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery.errors import DataError
from scale_surgery.show.figures import GREY, save_figure, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

    from scale_surgery.evidence.evaluate import Evaluation, Score

FIGURE_SIZE = (6.4, 4.8)
INK = "#222222"
# colours that people with any colour vision tell apart (Okabe and Ito); shapes tell the same
MARKERS: dict[str, dict[str, Any]] = {
    "base": {"marker": "*", "s": 190, "color": INK, "zorder": 4},
    "expanded": {"marker": "o", "s": 70, "color": "#0072B2", "zorder": 3},
    "adapt": {"marker": "^", "s": 70, "color": "#CC79A7", "zorder": 3},
    "disabled": {"marker": "o", "s": 330, "facecolor": "none", "edgecolor": "#009E73", "linewidth": 1.6, "zorder": 2},
    "other": {"marker": "s", "s": 60, "color": "#D55E00", "zorder": 3},
}
# of what is shown, at each side; labels need the room
MARGIN = 0.25
# models within this share of the plane stand on one point and share a label
SAME_PLACE = 0.005
# where a label may stand, the best first: points from its marker, and directions; from where on a line leads to it
DISTANCES = (11, 15, 20, 30, 45, 65, 90)
DIRECTIONS = ((1.0, 0.0), (-1.0, 0.0), (0.0, 1.0), (0.0, -1.0), (0.7, 0.7), (0.7, -0.7), (-0.7, 0.7), (-0.7, -0.7))
LINE_FROM = 18


@dataclass(frozen=True)
class Point:
    """A place in the plane, in nats per token, and the models that stand there."""

    old: float
    new: float
    scores: tuple[Score, ...]

    @property
    def label(self) -> str:
        """Names of the models, a line each; several with their expansion disabled are counted."""
        disabled = [score.name for score in self.scores if score.kind == "disabled"]
        named = [score.name for score in self.scores if score.kind != "disabled"]
        return "\n".join(named + (disabled if len(disabled) < 2 else [f"{len(disabled)} with expansion disabled"]))


def plane_figure(evaluation: Evaluation) -> Figure:
    """Draw the plane.

    Args:
        evaluation: What was measured.

    Returns:
        The figure; a model whose loss is not finite is not in it.

    Raises:
        DataError: If no model has a loss on old and on new text.
    """
    from matplotlib.figure import Figure

    scores = [score for score in evaluation.scores if all(map(math.isfinite, _place(score)))]
    if not scores:
        raise DataError("The plane has an axis for old and one for new text. Give text for both, --old and --new.")
    figure = Figure(figsize=FIGURE_SIZE, layout="constrained")
    axes = figure.subplots()
    width, height = _set_limits(axes, [_place(score) for score in scores])
    points = _join(scores, width * SAME_PLACE, height * SAME_PLACE)
    _draw_axes(axes)
    _draw_points(axes, points)
    figure.draw_without_rendering()
    _place_labels(axes, points)
    return figure


def _place(score: Score) -> tuple[float, float]:
    if score.old is None or score.new is None:
        return math.nan, math.nan
    return score.old.nats_per_token, score.new.nats_per_token


def _set_limits(axes: Axes, places: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Show all places with room for labels around; gives width and height of what is shown."""
    (left, right), (bottom, top) = (_limits(values) for values in zip(*places, strict=True))
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)
    return right - left, top - bottom


def _limits(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    # places that hardly differ are shown as such, not blown up
    spread = max(high - low, 0.05 * high, 1e-3)
    middle, half = (low + high) / 2, spread * (0.5 + MARGIN)
    # no loss is negative
    return max(middle - half, -0.04 * spread), middle + half


def _join(scores: Sequence[Score], old_reach: float, new_reach: float) -> list[Point]:
    points: list[Point] = []
    for score in scores:
        old, new = _place(score)
        near = [point for point in points if abs(point.old - old) <= old_reach and abs(point.new - new) <= new_reach]
        if near:
            points[points.index(near[0])] = Point(near[0].old, near[0].new, (*near[0].scores, score))
        else:
            points.append(Point(old, new, (score,)))
    return points


def _draw_axes(axes: Axes) -> None:
    axes.set_xlabel("loss on old text, nats per token      forgets \N{RIGHTWARDS ARROW}")
    axes.set_ylabel("\N{LEFTWARDS ARROW} learns      loss on new text, nats per token")
    tidy(axes)


def _draw_points(axes: Axes, points: Sequence[Point]) -> None:
    bases = {score.base for point in points for score in point.scores}
    for point in points:
        for score in point.scores:
            axes.scatter(point.old, point.new, **MARKERS[score.kind])
        if any(score.name in bases for score in point.scores):
            axes.axvline(point.old, color=GREY, linewidth=0.9, linestyle=(0, (2, 3)), zorder=1)
            axes.axhline(point.new, color=GREY, linewidth=0.9, linestyle=(0, (2, 3)), zorder=1)
    for start, end in _moves(points):
        style = {"arrowstyle": "->", "color": "#B0B0B0", "linewidth": 1.0, "shrinkA": 9, "shrinkB": 6}
        axes.annotate("", (end.old, end.new), (start.old, start.new), arrowprops=style, zorder=1)


def _moves(points: Sequence[Point]) -> Iterator[tuple[Point, Point]]:
    """From where to where models moved, away from their base."""
    where = {score.name: point for point in points for score in point.scores}
    for point in points:
        starts = {score.base for score in point.scores if score.base in where and where[score.base] is not point}
        yield from ((where[start], point) for start in sorted(filter(None, starts)))


def _place_labels(axes: Axes, points: Sequence[Point]) -> None:
    """Write each label near its point, where it covers no marker, no arrow and no other label."""
    markers = [_box(axes, point.old, point.new, 7) for point in points]
    taken = [*markers, *_arrow_boxes(axes, points)]
    offsets = [(distance * across, distance * up) for distance in DISTANCES for across, up in DIRECTIONS]
    for point, marker in zip(points, markers, strict=True):
        boxes = _label_boxes(axes, point, offsets)
        others = [other for other in markers if other is not marker]
        clashes = [_clashes(axes, box, marker, taken, others) for box in boxes]
        chosen = clashes.index(min(clashes))
        taken.append(boxes[chosen])
        _write(axes, point, offsets[chosen])
        if math.hypot(*offsets[chosen]) > LINE_FROM:
            _draw_line(axes, point, offsets[chosen])


def _label_boxes(axes: Axes, point: Point, offsets: Sequence[tuple[float, float]]) -> list[Bbox]:
    """What a label would cover at some offsets, in pixels."""
    from matplotlib.transforms import Bbox

    trial = _write(axes, point, (0, 0))
    size = trial.get_window_extent()
    trial.remove()
    x, y = axes.transData.transform((point.old, point.new))
    pixels = axes.figure.dpi / 72
    boxes = []
    for across, up in offsets:
        # the side of the label that is nearest to the point has the offset
        left = x + across * pixels - size.width * (1 - _sign(across)) / 2
        bottom = y + up * pixels - size.height * (1 - _sign(up)) / 2
        boxes.append(Bbox.from_bounds(left, bottom, size.width, size.height).padded(2))
    return boxes


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)


def _clashes(axes: Axes, box: Bbox, own: Bbox, taken: Sequence[Bbox], others: Sequence[Bbox]) -> int:
    """How many things a label would cover; the edge, and being nearer to another marker, count as one."""
    is_outside = axes.bbox.count_contains(box.corners()) < 4
    is_misread = any(_gap(box, other) <= _gap(box, own) for other in others)
    return int(box.count_overlaps(taken)) + is_outside + is_misread


def _gap(one: Bbox, other: Bbox) -> float:
    across = max(one.x0 - other.x1, other.x0 - one.x1, 0.0)
    up = max(one.y0 - other.y1, other.y0 - one.y1, 0.0)
    return math.hypot(across, up)


def _write(axes: Axes, point: Point, offset: tuple[float, float]) -> Annotation:
    across, up = map(_sign, offset)
    return axes.annotate(
        point.label,
        (point.old, point.new),
        offset,
        textcoords="offset points",
        horizontalalignment=("center", "left", "right")[across],
        verticalalignment=("center", "bottom", "top")[up],
        bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1},
        fontsize=9,
        color=INK,
        zorder=5,
    )


def _draw_line(axes: Axes, point: Point, offset: tuple[float, float]) -> None:
    style = {"arrowstyle": "-", "color": GREY, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 5}
    axes.annotate("", (point.old, point.new), offset, textcoords="offset points", arrowprops=style, zorder=4)


def _arrow_boxes(axes: Axes, points: Sequence[Point], parts: int = 20) -> list[Bbox]:
    """Small boxes along each arrow."""
    shares = [part / parts for part in range(1, parts)]
    return [
        _box(axes, start.old + share * (end.old - start.old), start.new + share * (end.new - start.new), 2)
        for start, end in _moves(points)
        for share in shares
    ]


def _box(axes: Axes, old: float, new: float, reach: float) -> Bbox:
    from matplotlib.transforms import Bbox

    x, y = axes.transData.transform((old, new))
    return Bbox([[x - reach, y - reach], [x + reach, y + reach]])


def plot_plane(evaluation: Evaluation, file: Path) -> None:
    """Draw the stability-plasticity plane: loss on old text against loss on new text, a point for each model.

    Args:
        evaluation: What was measured, on old and on new text.
        file: PNG to be; replaced where it exists.
    """
    save_figure(plane_figure(evaluation), file)
