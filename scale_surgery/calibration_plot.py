"""Forgetting against learning as PNG: a point for each setting of a router, beside the base and the adapt path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery.plots import GREY, VERMILION, save_figure, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

    from scale_surgery.route_calibrate import Calibration
    from scale_surgery.routing_sweep import Outcome

PANEL_WIDTH, HEIGHT = 5.2, 5.0
INK = "#222222"
# of what is shown, at each side
MARGIN = 0.07
# settings that fill less of an axis than this get a panel of their own
SMALL = 0.5
# nothing is blown up beyond this, in nats per token
LEAST_SPREAD = 0.005
# the marks that both panels share
MARKS: dict[str, dict[str, Any]] = {
    "base": {"marker": "*", "s": 190, "color": INK, "zorder": 4},
    "adapt": {"marker": "s", "s": 70, "color": VERMILION, "zorder": 4},
    "present": {"marker": "D", "s": 110, "facecolor": "none", "edgecolor": INK, "linewidth": 1.4, "zorder": 5},
    "proposed": {"marker": "o", "s": 260, "facecolor": "none", "edgecolor": VERMILION, "linewidth": 2.0, "zorder": 5},
}


def plot_calibration(result: Calibration, file: Path) -> None:
    """Draw forgetting against learning for every setting; base, adapt path, present and best setting are marked.

    Args:
        result: What was measured.
        file: PNG to be; replaced where it exists.
    """
    save_figure(calibration_figure(result), file)


def calibration_figure(result: Calibration) -> Figure:
    """The figure of `plot_calibration`; a second panel shows the settings alone where they lie close together."""
    from matplotlib.figure import Figure

    references = [result.base, result.adapt]
    panels = [[*references, *result.outcomes]]
    if _is_crowded(result.outcomes, panels[0]):
        panels.append(list(result.outcomes))
    figure = Figure(figsize=(PANEL_WIDTH * len(panels), HEIGHT), layout="constrained")
    for axes, shown in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _set_limits(axes, shown)
        _draw_lines(axes, result)
        _draw_marks(axes, result, [name for name in MARKS if getattr(result, name) in shown])
        tidy(axes)
        axes.set_xlabel("forgetting on old text, nats per token")
    figure.axes[0].set_ylabel("learning on new text, nats per token")
    _draw_legend(figure, figure.axes[0])
    if result.proposed.routing is not None and result.proposed.routing.router == "cosine":
        figure.draw_without_rendering()
        _name_thresholds(figure.axes[-1], result)
    return figure


def _is_crowded(outcomes: Sequence[Outcome], shown: Sequence[Outcome]) -> bool:
    pairs = zip(_limits(outcomes), _limits(shown), strict=True)
    return any(own[1] - own[0] < SMALL * (whole[1] - whole[0]) for own, whole in pairs)


def _limits(outcomes: Sequence[Outcome]) -> list[tuple[float, float]]:
    """Ends of both axes."""
    ends = []
    for values in ([outcome.forgetting for outcome in outcomes], [outcome.learning for outcome in outcomes]):
        low, high = min(values), max(values)
        spread = max(high - low, LEAST_SPREAD)
        ends.append((low - MARGIN * spread, low + (1 + MARGIN) * spread))
    return ends


def _set_limits(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    across, up = _limits(outcomes)
    axes.set_xlim(*across)
    axes.set_ylim(*up)


def _draw_lines(axes: Axes, result: Calibration) -> None:
    """Draw each line of settings that differ in one number, and how much may be forgotten."""
    for label, colour, line in _lines(result.outcomes):
        x, y = [outcome.forgetting for outcome in line], [outcome.learning for outcome in line]
        axes.plot(x, y, color=colour, linewidth=1.0, zorder=2)
        # along a line the preserve path loses weight, and the points grow
        sizes = [12 + 36 * place / max(1, len(line) - 1) for place in range(len(line))]
        axes.scatter(x, y, s=sizes, color=colour, zorder=3, label=label)
    left, right = axes.get_xlim()
    if left <= result.most_forgetting <= right:
        axes.axvline(result.most_forgetting, color=GREY, linewidth=1.0, linestyle=(0, (2, 3)), zorder=1)


def _lines(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, Any, list[Outcome]]]:
    """Name, colour and points of each line, the preserve path's weight falling."""
    from matplotlib import colormaps

    settings = [(outcome.routing, outcome) for outcome in outcomes if outcome.routing is not None]
    if settings[0][0].router == "cosine":
        yield "threshold, larger: higher", "#0072B2", [outcome for _, outcome in settings]
        return
    by_rate = [(rate, list(some)) for rate, some in groupby(settings, key=lambda pair: pair[0].switch_rate)]
    colours = colormaps["viridis"]([place / max(1, len(by_rate) - 1) * 0.92 for place in range(len(by_rate))])
    for (rate, some), colour in zip(by_rate, colours, strict=True):
        yield f"switch rate {rate:g}", colour, [outcome for _, outcome in reversed(some)]


def _draw_marks(axes: Axes, result: Calibration, names: Sequence[str]) -> None:
    said = {
        "base": "base model",
        "adapt": "adapt path alone",
        "present": f"present: {_numbers(result.present)}",
        "proposed": f"best: {_numbers(result.proposed)}",
    }
    for name in names:
        outcome: Outcome = getattr(result, name)
        axes.scatter(outcome.forgetting, outcome.learning, label=said[name], **MARKS[name])


def _numbers(outcome: Outcome) -> str:
    routing = outcome.routing
    assert routing is not None
    if routing.router == "cosine":
        return f"threshold {routing.threshold:.10g}"
    return f"prior {routing.prior:g}, switch rate {routing.switch_rate:g}"


def _draw_legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)


def _name_thresholds(axes: Axes, result: Calibration) -> None:
    """Write thresholds beside their points, those that cover neither a point nor each other."""
    points = axes.transData.transform([(outcome.forgetting, outcome.learning) for outcome in result.outcomes])
    taken: list[Bbox] = []
    first = [result.proposed, result.present, result.outcomes[0], result.outcomes[-1], *result.outcomes]
    for outcome in dict.fromkeys(first):
        label = axes.annotate(
            f"{outcome.routing.threshold:.10g}" if outcome.routing is not None else "",
            (outcome.forgetting, outcome.learning),
            (7, -7),
            textcoords="offset points",
            horizontalalignment="left",
            verticalalignment="top",
            fontsize=8,
            color=INK,
            zorder=6,
        )
        box = label.get_window_extent()
        is_outside = axes.bbox.count_contains(box.corners()) < 4
        if is_outside or box.count_overlaps(taken) or box.count_contains(points):
            label.remove()
        else:
            taken.append(box)
