"""Curves of the report's page, drawn by matplotlib and coloured by the page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from scale_surgery.planning.methods import METHODS
from scale_surgery.show.figures import (
    BLUE,
    GREY,
    PALE,
    PANELS,
    VERMILION,
    Curve,
    draw_curve,
    training_curves,
)
from scale_surgery.show.pages.inline_svg import inline_svg
from scale_surgery.show.tables_report import GROUPS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import Locator

    from scale_surgery.evidence.report_records import Report, Streams, TensorChange

# in points, one of which is a pixel where the page is as wide; a row of the legend comes to the height
WIDTH, HEIGHT, ROW = 360, 220, 17
FONT_SIZE = 11
LEGEND_COLUMNS = 4
MOST_TICKS = 6
COLOURS = {"attn": BLUE, "ffn": VERMILION}
# two colours that people with any colour vision tell apart, and five steps from one light to one dark: for layers
LINES = {
    "light": {"first": "#0072b2", "second": "#c04a00"},
    "dark": {"first": "#6cb8f0", "second": "#ffa25c"},
}
STEPS = {
    "light": ("#8cc0e8", "#4f97d2", "#2171b5", "#0d4d87", "#062a4f"),
    "dark": ("#2f6ea8", "#4b92d1", "#7ab5e8", "#afd6f7", "#eaf5ff"),
}
# variables of the page for the colours that are drawn
VARIABLES = {BLUE: "first", VERMILION: "second", GREY: "muted", PALE: "line"}
VARIABLES |= {colour: f"step{place}" for place, colour in enumerate(STEPS["light"])}


@dataclass(frozen=True)
class Chart:
    """A drawing of the page: what it shows, and the SVG element, in which every text is escaped."""

    title: str
    svg: str


def render_chart(
    title: str, curves: Sequence[Curve], x_label: str, y_label: str, *, is_log: bool = False, reaches: float | None = 0
) -> Iterator[Chart]:
    """Draw a chart.

    Args:
        title: What it shows.
        curves: Its lines.
        x_label: What is to the right; whole numbers.
        y_label: What is up.
        is_log: Whether the vertical axis is logarithmic; values that are not above zero then break the line too.
        reaches: A value that a linear vertical axis has to reach, such as zero; None for none.

    Yields:
        The chart; none where no curve has a point to draw.
    """
    shown = [_with_breaks(curve, is_log) for curve in curves]
    if not any(map(_is_drawn, shown)):
        return
    figure = chart_figure(shown, is_log=is_log, reaches=reaches)
    figure.axes[0].set_xlabel(x_label, color=GREY, fontsize=FONT_SIZE)
    figure.axes[0].set_ylabel(y_label, color=GREY, fontsize=FONT_SIZE)
    yield Chart(title, inline_svg(figure, f"{title}: {y_label} over {x_label}", VARIABLES))


def _with_breaks(curve: Curve, is_log: bool) -> Curve:
    """The curve with NaN for each value that cannot be drawn."""
    points = [(x, y if math.isfinite(y) and (y > 0 or not is_log) else math.nan) for x, y in curve.points]
    return replace(curve, points=points)


def _is_drawn(curve: Curve) -> bool:
    return any(math.isfinite(value) for _, value in curve.points)


def chart_figure(curves: Sequence[Curve], *, is_log: bool, reaches: float | None) -> Figure:
    """Draw curves, one of which has a value, with a legend where there are several."""
    from matplotlib.figure import Figure

    named = [curve for curve in curves if curve.in_legend and _is_drawn(curve)]
    rows = math.ceil(len(named) / LEGEND_COLUMNS) if len(named) > 1 else 0
    size = (WIDTH / 72, (HEIGHT + rows * ROW) / 72)
    figure = Figure(figsize=size, layout="constrained", frameon=False)
    axes = figure.subplots()
    lines = [draw_curve(axes, curve) for curve in curves]
    _set_axes(axes, curves, is_log=is_log, reaches=reaches)
    if rows:
        handles = [line for line, curve in zip(lines, curves, strict=True) if curve in named]
        options: dict[str, Any] = {
            "ncols": LEGEND_COLUMNS,
            "frameon": False,
            "handlelength": 1.6,
            "fontsize": FONT_SIZE,
            "labelcolor": GREY,
        }
        figure.legend(handles=handles, loc="outside lower left", **options)
    return figure


def _set_axes(axes: Axes, curves: Sequence[Curve], *, is_log: bool, reaches: float | None) -> None:
    from matplotlib.ticker import MaxNLocator, NullLocator

    values = [value for curve in curves for _, value in curve.points if math.isfinite(value)]
    # places of breaks too, so that a line that ends before the others is seen to end
    places = [place for curve in curves for place, _ in curve.points]
    ends = values if is_log or reaches is None else [*values, reaches]
    axes.update_datalim([(min(places), min(ends)), (max(places), max(ends))])
    if is_log:
        axes.set_yscale("log")
    axes.autoscale_view()
    axes.xaxis.set_major_locator(MaxNLocator(MOST_TICKS, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    linear = MaxNLocator(MOST_TICKS, steps=[1, 2, 5, 10])
    axes.yaxis.set_major_locator(_log_locator(*axes.get_ylim()) if is_log else linear)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:.6g}")
    axes.yaxis.set_major_formatter("{x:.4g}")
    axes.set_frame_on(False)
    axes.tick_params(left=False, bottom=False, labelsize=FONT_SIZE, labelcolor=GREY)
    axes.grid(axis="y", color=PALE, linewidth=0.7)
    axes.set_axisbelow(True)


def _log_locator(low: float, high: float) -> Locator:
    """Ticks at as many multiples of powers of ten as there is room for."""
    from matplotlib.ticker import LogLocator

    decades = math.log10(high / low)
    digits: Sequence[int] = (1,) if decades > 3 else (1, 2, 5) if decades > 0.6 else range(1, 10)
    return LogLocator(subs=digits, numticks=MOST_TICKS + 1)


def run_charts(report: Report) -> Iterator[Chart]:
    """What the last training run logged."""
    titles = ("Training loss", "Forgetting and learning", "Questions answered")
    for title, (label, lines) in zip(titles, PANELS, strict=True):
        yield from render_chart(title, training_curves(report.log, lines), "step", label)


def collaboration_charts(report: Report) -> Iterator[Chart]:
    """W12 over layers; none of a model that was not trained."""
    if report.state != "trained":
        return
    # what started as zeros has the norm of its change
    norm, share = ("Norm", "Norm over that of W"), ("Change", "Change over the norm of W")
    titles = norm if METHODS[report.method].starts_at_zero else share
    labels = (titles[0].lower(), "share of W's norm")
    for title, label, name in zip(titles, labels, ("change", "change_of_base"), strict=True):
        curves = [_layer_curve(report, group, name) for group in GROUPS]
        groups = [curve.name for curve in curves if curve.points]
        yield from render_chart(f"{title}, {' and '.join(groups)}", curves, "layer", label)


def _layer_curve(report: Report, group: str, name: str) -> Curve:
    """A number of W12 of one group over the layers that have one."""
    own = (layer for layer in report.layers if (layer.group, layer.block) == (group, "w12"))
    found = ((layer.layer, getattr(layer.norms, name)) for layer in own)
    return Curve(GROUPS[group], [point for point in found if point[1] is not None], COLOURS[group])


def stream_charts(streams: Streams) -> Iterator[Chart]:
    """How far the base stream turned and moved, over layers."""
    # the embedding's base part is the base model's, whatever was trained
    after = [layer for layer in streams.layers if layer.layer >= 0]
    cosines = Curve("cosine", [(layer.layer, layer.cosine) for layer in after], BLUE)
    drifts = Curve("drift", [(layer.layer, layer.drift) for layer in after], BLUE)
    yield from render_chart("Cosine with the base model's", [cosines], "after layer", "cosine", reaches=1)
    yield from render_chart("Drift from the base model's", [drifts], "after layer", "largest difference")


def spectrum_charts(report: Report) -> Iterator[Chart]:
    """Singular values of W21, a chart for each role."""
    with_spectrum = [tensor for tensor in report.tensors if tensor.spectrum is not None]
    for role in dict.fromkeys(tensor.role for tensor in with_spectrum):
        own = [tensor for tensor in with_spectrum if tensor.role == role]
        curves = [curve for place, tensor in enumerate(_some(own)) for curve in _spectrum_curves(tensor, place)]
        yield from render_chart(role, curves, "rank", "singular value", is_log=True)


def _some(tensors: Sequence[TensorChange]) -> list[TensorChange]:
    """At most as many as there are steps of colour, evenly spaced, the first and the last among them."""
    most = len(STEPS["light"])
    if len(tensors) <= most:
        return list(tensors)
    return [tensors[round(place * (len(tensors) - 1) / (most - 1))] for place in range(most)]


def _spectrum_curves(tensor: TensorChange, place: int) -> Iterator[Curve]:
    spectrum = tensor.spectrum
    assert spectrum is not None
    name, colour = f"layer {tensor.layer}", STEPS["light"][place]
    if tensor.is_trained:
        start = list(zip(spectrum.ranks, spectrum.start, strict=True))
        yield Curve(f"{name} at the start", start, colour, "--", in_legend=False)
    yield Curve(name, list(zip(spectrum.ranks, spectrum.now, strict=True)), colour)
