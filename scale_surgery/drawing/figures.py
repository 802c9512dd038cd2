"""Curves for files and pages, and the figure of a training run. pyplot is not used."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery.checkpoint.files import finished_file
from scale_surgery.drawing.palette import BLUE, GREY, VERMILION
from scale_surgery.visible import visible_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D


DOTS_PER_INCH = 160
PANEL_SIZE = (7.0, 2.1)
# shapes repeat the distinction by colours
MARKERS = {BLUE: "o", VERMILION: "s"}
# a curve with more points than this has no markers
MOST_MARKERS = 40
# a curve with more points than this is smoothed by a running mean over this share of it
NOISY_POINTS = 60
SMOOTHED_SHARE = 1 / 30

# panels of a training run by axis label; a line is the key in the records, the name and the colour
Line = tuple[str, str, str]
PANELS: tuple[tuple[str, tuple[Line, ...]], ...] = (
    ("nats", (("loss", "objective", BLUE),)),
    ("nats per token", (("forgetting", "forgetting (old text)", VERMILION), ("learning", "learning (new text)", BLUE))),
    ("accuracy", (("old_accuracy", "old questions", VERMILION), ("new_accuracy", "new questions", BLUE))),
)


@dataclass(frozen=True)
class Curve:
    """A line of a figure.

    Attributes:
        name: Name in the legend.
        points: Its points. The line is interrupted at a value that is not finite.
        colour: Its colour, as #rrggbb.
        style: Solid or dashed, as matplotlib spells it.
        in_legend: True if the legend names it.
        has_markers: True if its points are marked, provided there are few.
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    style: str = "-"
    in_legend: bool = True
    has_markers: bool = True


def draw_curve(axes: Axes, curve: Curve) -> Line2D:
    """Draw a line, with markers if it has few points."""
    marker = MARKERS.get(curve.colour, "") if curve.has_markers and len(curve.points) <= MOST_MARKERS else ""
    x, y = [place for place, _ in curve.points], [value for _, value in curve.points]
    (line,) = axes.plot(
        x, y, label=curve.name, color=curve.colour, linestyle=curve.style, linewidth=1.6, marker=marker, markersize=5
    )
    return line


def plot_training(records: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw loss, forgetting, learning and accuracies against the steps of a run into a PNG or SVG file."""
    save_figure(training_figure(records), file)


def save_figure(figure: Figure, file: Path) -> None:
    """Write a figure atomically, as SVG if the suffix is .svg and as PNG otherwise. Equal figures give equal bytes."""
    with finished_file(file) as temporary:
        _write(figure, temporary, "svg" if file.suffix.lower() == ".svg" else "png", facecolor="white")


def image_of(figure: Figure) -> str:
    """Return a figure as a data URL of an SVG with a transparent background."""
    written = io.BytesIO()
    _write(figure, written, "svg", transparent=True)
    return f"data:image/svg+xml;base64,{base64.b64encode(written.getvalue()).decode()}"


def _write(figure: Figure, file: Any, form: str, **options: Any) -> None:
    from matplotlib import rc_context
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_text(visible_text(text.get_text()))
    # no time and no random ids, so that equal figures give equal bytes
    unsaid: dict[str, Any] = {"svg": {"Date": None}, "png": {"Software": None}}[form]
    with rc_context({"svg.hashsalt": "scale-surgery", "svg.fonttype": "none"}):
        figure.savefig(file, format=form, dpi=DOTS_PER_INCH, metadata=unsaid, **options)


def training_figure(records: Sequence[Mapping[str, Any]]) -> Figure:
    """Return the figure of `plot_training`; empty panels are omitted, except the first."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    shown = [panel for panel in PANELS if any(curve_of(records, key)[0] for key, _, _ in panel[1])] or [PANELS[0]]
    width, height = PANEL_SIZE
    figure = Figure(figsize=(width, height * len(shown) + 0.3), layout="constrained")
    rows = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (label, lines) in zip(rows, shown, strict=True):
        _draw_panel(axes, label, records, lines)
    rows[-1].set_xlabel("optimizer steps")
    rows[-1].xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    figure.align_ylabels()
    return figure


def curve_of(records: Sequence[Mapping[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """Return steps and values of the records that have a key."""
    points = [(record["step"], record[key]) for record in records if record.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]


def training_curves(records: Sequence[Mapping[str, Any]], lines: Sequence[Line]) -> list[Curve]:
    """Return the curves of a panel that have data, smoothed if they have many points."""
    curves = []
    for key, name, colour in lines:
        steps, values = curve_of(records, key)
        curves.append(Curve(name, list(zip(steps, running_mean(values), strict=True)), colour))
    return [curve for curve in curves if curve.points]


def _draw_panel(axes: Axes, label: str, records: Sequence[Mapping[str, Any]], lines: Sequence[Line]) -> None:
    for curve in training_curves(records, lines):
        draw_curve(axes, curve)
    for key, _, colour in lines:
        steps, values = curve_of(records, key)
        if len(steps) > NOISY_POINTS:
            axes.plot(steps, values, color=colour, linewidth=0.6, alpha=0.35, zorder=1)
    tidy(axes)
    axes.set_ylabel(label)
    if label == "accuracy":
        axes.set_ylim(-0.04, 1.04)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    if len(axes.get_lines()):
        axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize=9, borderpad=0, borderaxespad=0.4
        )


def running_mean(values: Sequence[float]) -> list[float]:
    """Return as many values as given: unchanged, or as means over neighbours if there are many."""
    if len(values) <= NOISY_POINTS:
        return list(values)
    reach = math.ceil(len(values) * SMOOTHED_SHARE / 2)
    windows = (values[max(0, place - reach) : place + reach + 1] for place in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def tidy(axes: Axes) -> None:
    """Lighten the frame and the grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(color=GREY, labelsize=9)
    axes.grid(color=GREY, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
