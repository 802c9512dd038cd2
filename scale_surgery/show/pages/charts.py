"""Curves of the report's page: images that the page holds itself, legible on white and on black."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scale_surgery.drawing.figures import PANELS, Curve, draw_curve, image_of, tidy, training_curves
from scale_surgery.drawing.palette import BLUE, GREY, VERMILION
from scale_surgery.planning.methods import METHODS
from scale_surgery.show.tables_report import GROUPS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from scale_surgery.evidence.report_records import Report, Streams

# in inches; a row of the legend comes to the height
WIDTH, HEIGHT, ROW = 4.4, 2.7, 0.24
LEGEND_COLUMNS = 3
COLOURS = {"attn": BLUE, "ffn": VERMILION}


@dataclass(frozen=True)
class Chart:
    """An image of the page: title, text for screen readers, and data URL."""

    title: str
    label: str
    image: str


def render_chart(
    title: str, curves: Sequence[Curve], x_label: str, y_label: str, *, reaches: float | None = 0
) -> Iterator[Chart]:
    """Draw a chart."""
    shown = [curve for curve in curves if any(math.isfinite(y) for _, y in curve.points)]
    if shown:
        figure = chart_figure(shown, x_label, y_label, reaches=reaches)
        yield Chart(title, f"{title}: {y_label} over {x_label}", image_of(figure))


def chart_figure(curves: Sequence[Curve], x_label: str = "", y_label: str = "", *, reaches: float | None = 0) -> Figure:
    """The figure of `render_chart`, with a legend where several curves have a name there."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    named = [curve for curve in curves if curve.in_legend]
    rows = math.ceil(len(named) / LEGEND_COLUMNS) if len(named) > 1 else 0
    with rc_context({"text.color": GREY, "axes.labelcolor": GREY, "xtick.color": GREY, "ytick.color": GREY}):
        figure = Figure(figsize=(WIDTH, HEIGHT + rows * ROW), layout="constrained")
        axes = figure.subplots()
        lines = [draw_curve(axes, curve) for curve in curves]
        tidy(axes)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        places = [place for curve in curves for place, _ in curve.points]
        axes.ticklabel_format(useOffset=False)
        # the axes span all points, so that a shorter line shows as such
        height = axes.dataLim.y0 if reaches is None else reaches
        axes.update_datalim([(min(places), height), (max(places), height)])
        axes.autoscale_view()
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
        if rows:
            handles = [line for line, curve in zip(lines, curves, strict=True) if curve.in_legend]
            figure.legend(handles=handles, loc="outside lower left", ncols=LEGEND_COLUMNS, frameon=False, fontsize=9)
    return figure


def run_charts(report: Report) -> Iterator[Chart]:
    """Curves of the last training run."""
    titles = ("Training loss", "Forgetting and learning", "Questions answered")
    for title, (label, lines) in zip(titles, PANELS, strict=True):
        yield from render_chart(title, training_curves(report.log, lines), "step", label)


def collaboration_charts(report: Report) -> Iterator[Chart]:
    """W12 over layers; none of a model that was not trained."""
    if report.state != "trained":
        return
    # a block that started as zeros has the norm of its change
    norm, share = ("Norm", "Norm over the norm of W"), ("Change", "Change over the norm of W")
    titles = norm if METHODS[report.method].starts_at_zero else share
    labels = (titles[0].lower(), "share of W's norm")
    for title, label, name in zip(titles, labels, ("change", "change_of_base"), strict=True):
        curves = [_layer_curve(report, group, name) for group in GROUPS]
        groups = [curve.name for curve in curves if curve.points]
        yield from render_chart(f"{title}, {' and '.join(groups)}", curves, "layer", label)


def _layer_curve(report: Report, group: str, name: str) -> Curve:
    """A number of W12 of one group over the layers that have one."""
    layers = (layer for layer in report.layers if (layer.group, layer.block) == (group, "w12"))
    points = ((layer.layer, getattr(layer.norms, name)) for layer in layers)
    return Curve(GROUPS[group], [(place, value) for place, value in points if value is not None], COLOURS[group])


def stream_charts(streams: Streams) -> Iterator[Chart]:
    """How far the base stream turned and moved, over layers."""
    # the embedding's base part is the base model's, whatever was trained
    after = [layer for layer in streams.layers if layer.layer >= 0]
    cosines = Curve("cosine", [(layer.layer, layer.cosine) for layer in after], BLUE)
    drifts = Curve("drift", [(layer.layer, layer.drift) for layer in after], BLUE)
    yield from render_chart("Cosine with the base model", [cosines], "after layer", "cosine", reaches=1)
    yield from render_chart("Drift from the base model", [drifts], "after layer", "largest difference")
