"""Figures as PNG: a training run, and the stability-plasticity plane. matplotlib's own state is not touched."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery.checkpoint.staging import finished_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


DOTS_PER_INCH = 160
PANEL_SIZE = (7.0, 2.1)
# three colours that people with any colour vision tell apart (Okabe and Ito)
BLUE, VERMILION, GREY = "#0072B2", "#D55E00", "#767676"
# a curve of more points than this gets a running mean, over this share of it
NOISY_POINTS = 60
SMOOTHED_SHARE = 1 / 30

# panel of a training run: label of the axis, and for each curve its key in the records, its name and its colour
PANELS = (
    ("nats per token", (("loss", "training loss", BLUE),)),
    ("nats per token", (("forgetting", "forgetting (old text)", VERMILION), ("learning", "learning (new text)", BLUE))),
    ("accuracy", (("old_accuracy", "old questions", VERMILION), ("new_accuracy", "new questions", BLUE))),
)


def plot_training(records: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw a training run: loss, forgetting and learning, and accuracies where there are any, over steps.

    Args:
        records: What was logged, each with "step" and some of the keys of PANELS, in the order of steps.
        file: PNG to be; replaced where it exists.
    """
    save_figure(training_figure(records), file)


def save_figure(figure: Figure, file: Path) -> None:
    """Write a figure as PNG, whole or not at all; equal figures give equal bytes."""
    with finished_file(file) as temporary:
        figure.savefig(temporary, format="png", dpi=DOTS_PER_INCH, facecolor="white", metadata={"Software": None})


def training_figure(records: Sequence[Mapping[str, Any]]) -> Figure:
    """The figure of `plot_training`; a panel without data is left out, the first one never."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    shown = [panel for panel in PANELS if any(curve_of(records, key)[0] for key, _, _ in panel[1])] or [PANELS[0]]
    width, height = PANEL_SIZE
    figure = Figure(figsize=(width, height * len(shown) + 0.3), layout="constrained")
    rows = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (label, curves) in zip(rows, shown, strict=True):
        _draw_panel(axes, label, [(curve_of(records, key), name, colour) for key, name, colour in curves])
    rows[-1].set_xlabel("optimizer steps")
    rows[-1].xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    figure.align_ylabels()
    return figure


def curve_of(records: Sequence[Mapping[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """Steps and values of the records that have a key."""
    points = [(record["step"], record[key]) for record in records if record.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _draw_panel(axes: Axes, label: str, curves: Sequence[tuple[tuple[list[float], list[float]], str, str]]) -> None:
    for (steps, values), name, colour in curves:
        if not steps:
            continue
        is_noisy = len(steps) > NOISY_POINTS
        marker = "" if len(steps) > NOISY_POINTS / 2 else "o"
        axes.plot(steps, running_mean(values), color=colour, label=name, linewidth=1.6, marker=marker, markersize=4)
        if is_noisy:
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
    """Values as they are, or means over their neighbours where they are many; as many as went in."""
    if len(values) <= NOISY_POINTS:
        return list(values)
    reach = math.ceil(len(values) * SMOOTHED_SHARE / 2)
    windows = (values[max(0, place - reach) : place + reach + 1] for place in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def tidy(axes: Axes) -> None:
    """Leave of the frame and the grid what helps to read values."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(color=GREY, labelsize=9)
    axes.grid(color="#E5E5E5", linewidth=0.6)
    axes.set_axisbelow(True)
