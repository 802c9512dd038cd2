"""Line charts as SVG in a page: they take their colours from it, so that they are right in light and in dark.

Each is drawn for a width of about 22rem, at which its text has the size of the page's, and grows little beyond.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby
from typing import Literal

WIDTH, HEIGHT = 360, 220
LEFT, RIGHT, TOP, BOTTOM = 48, 10, 10, 36
# a curve of more points has no markers, but where one stands alone
MOST_MARKERS = 40
MOST_TICKS = 5
# multiples of powers of ten at which a logarithmic axis may have ticks, the closest first
LOG_DIGITS = ((1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 3, 5, 7), (1, 2, 5))


@dataclass(frozen=True)
class Curve:
    """A line of a chart.

    Attributes:
        name: What it shows, for the legend.
        points: Its points; the line breaks at a value that is not finite, and joins nothing across it.
        colour: Name of the page's variable for its colour.
        marker: Shape of its points: circle, square, or none of them.
        is_dashed: Whether it is dashed.
        in_legend: Whether the legend names it.
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    marker: Literal["circle", "square"] | None = None
    is_dashed: bool = False
    in_legend: bool = True


@dataclass(frozen=True)
class Axis:
    """An axis: what it shows, from where to where, and the values that are written."""

    label: str
    low: float
    high: float
    ticks: Sequence[float]
    is_log: bool = False

    def share(self, value: float) -> float:
        """Where a value stands, from 0 to 1."""
        low, high, at = (math.log(one) if self.is_log else one for one in (self.low, self.high, value))
        return (at - low) / (high - low)


def render_chart(
    title: str, curves: Sequence[Curve], x_label: str, y_label: str, *, is_log: bool = False, reaches: float | None = 0
) -> str:
    """Draw a chart as an HTML figure.

    Args:
        title: What it shows.
        curves: Its lines.
        x_label: What is to the right; whole numbers.
        y_label: What is up.
        is_log: Whether the vertical axis is logarithmic; values that are not above zero then break the line too.
        reaches: A value that a linear vertical axis has to reach, such as zero; None for none.

    Returns:
        The figure; empty where no curve has a point to draw.
    """
    shown = [_with_breaks(curve, is_log) for curve in curves]
    values = [value for curve in shown for _, value in curve.points if math.isfinite(value)]
    if not values:
        return ""
    # of breaks too, so that a line that ends before the others is seen to end
    places = [place for curve in shown for place, _ in curve.points]
    x = linear_axis(x_label, min(places), max(places), is_whole=True)
    y = log_axis(y_label, values) if is_log else linear_axis(y_label, *_limits(values, reaches))
    lines = "\n".join(part for curve in shown for part in _curve(curve, x, y))
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(f"{title}: {y_label} over {x_label}")}">\n'
        f"{''.join(_grid(x, y))}\n{lines}\n</svg>"
    )
    return f"<figure>\n<figcaption>{escape(title)}</figcaption>\n{svg}\n{_legend(shown)}</figure>"


def _with_breaks(curve: Curve, is_log: bool) -> Curve:
    """The curve with NaN for each value that cannot be drawn."""
    points = [(x, y if math.isfinite(y) and (y > 0 or not is_log) else math.nan) for x, y in curve.points]
    return replace(curve, points=points)


def _pieces(curve: Curve) -> Iterator[list[tuple[float, float]]]:
    """Points between the breaks, each run of them by itself."""
    for is_drawn, piece in groupby(curve.points, key=lambda point: math.isfinite(point[1])):
        if is_drawn:
            yield list(piece)


def _limits(values: Sequence[float], reaches: float | None) -> tuple[float, float]:
    reached = [*values, *([] if reaches is None else [reaches])]
    return min(reached), max(reached)


def linear_axis(label: str, low: float, high: float, *, is_whole: bool = False) -> Axis:
    """Make an axis with at most MOST_TICKS + 1 round ticks; that of whole numbers ends where they do."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        # one value alone stands in the middle
        low, high = (low - 1, high + 1) if is_whole else (low - abs(low) / 2 or -1.0, high + abs(high) / 2 or 1.0)
    rough = (high - low) / MOST_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= rough)
    step = max(1.0, step) if is_whole else step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    if not is_whole:
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        low, high = first * step, last * step
    return Axis(label, low, high, [number * step for number in range(first, last + 1)])


def log_axis(label: str, values: Sequence[float]) -> Axis:
    """Make a logarithmic axis around values, with as many round ticks as there is room for."""
    low, high = min(values) / 1.1, max(values) * 1.1
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    choices = [[digit * 10.0**power for power in powers for digit in digits] for digits in LOG_DIGITS]
    choices += [[10.0**power for power in powers[::step]] for step in range(1, len(powers) + 1)]
    shown = ([tick for tick in ticks if low <= tick <= high] for ticks in choices)
    return Axis(label, low, high, next(ticks for ticks in shown if len(ticks) <= MOST_TICKS + 2), is_log=True)


def _place(x: Axis, y: Axis, point: tuple[float, float]) -> tuple[float, float]:
    across = LEFT + x.share(point[0]) * (WIDTH - LEFT - RIGHT)
    return across, HEIGHT - BOTTOM - y.share(point[1]) * (HEIGHT - TOP - BOTTOM)


def _grid(x: Axis, y: Axis) -> Iterator[str]:
    for tick in y.ticks:
        _, down = _place(x, y, (x.low, tick))
        yield f'<line class=grid x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down:.1f}" y2="{down:.1f}"/>'
        yield f'<text class=y x="{LEFT - 6}" y="{down + 4:.1f}">{tick:.4g}</text>'
    for tick in x.ticks:
        across, _ = _place(x, y, (tick, y.low))
        yield f'<text class=x x="{across:.1f}" y="{HEIGHT - BOTTOM + 15}">{tick:.6g}</text>'
    yield f'<text class=x x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}">{escape(x.label)}</text>'
    middle = (TOP + HEIGHT - BOTTOM) / 2
    yield f'<text class=x transform="translate(10 {middle}) rotate(-90)">{escape(y.label)}</text>'


def _curve(curve: Curve, x: Axis, y: Axis) -> Iterator[str]:
    dashes = " stroke-dasharray=4,3" if curve.is_dashed else ""
    title = f"<title>{escape(curve.name)}</title>"
    for piece in _pieces(curve):
        places = [_place(x, y, point) for point in piece]
        is_line = len(piece) > 1
        if is_line:
            path = " ".join(f"{across:.1f},{down:.1f}" for across, down in places)
            yield f'<polyline points="{path}" stroke="var(--{curve.colour})"{dashes}>{title}</polyline>'
        # a point alone has no line to be seen by
        if _is_marked(curve) or not is_line:
            yield from (_marker(curve, x, *both) for both in zip(piece, places, strict=True))


def _is_marked(curve: Curve) -> bool:
    return curve.marker is not None and len(curve.points) <= MOST_MARKERS


def _marker(curve: Curve, x: Axis, point: tuple[float, float], place: tuple[float, float]) -> str:
    title = escape(f"{curve.name}, {x.label} {point[0]:g}: {point[1]:.4g}")
    return f'<g fill="var(--{curve.colour})">{_shape(curve, *place)}<title>{title}</title></g>'


def _shape(curve: Curve, across: float, down: float) -> str:
    if curve.marker == "square":
        return f'<rect x="{across - 3:.1f}" y="{down - 3:.1f}" width="6" height="6"/>'
    return f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3.2"/>'


def _legend(curves: Sequence[Curve]) -> str:
    """Names of the lines, where there are several."""
    named = [curve for curve in curves if curve.in_legend and any(_pieces(curve))]
    if len(named) < 2:
        return ""
    entries = "".join(f"<li>{_sample(curve)}{escape(curve.name)}</li>" for curve in named)
    return f"<ul class=legend>{entries}</ul>\n"


def _sample(curve: Curve) -> str:
    dashes = " stroke-dasharray=4,3" if curve.is_dashed else ""
    line = f'<line x1="0" x2="22" y1="6" y2="6" stroke="var(--{curve.colour})"{dashes}/>'
    marker = f'<g fill="var(--{curve.colour})">{_shape(curve, 11, 6)}</g>' if _is_marked(curve) else ""
    return f'<svg viewBox="0 0 22 12" width="22" height="12" aria-hidden="true">{line}{marker}</svg>'
