"""Forgetting against learning as PNG: a point per setting of a router, and the base and the adapt path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from scale_surgery.drawing.figures import tidy
from scale_surgery.drawing.palette import GREY, INK, VERMILION
from scale_surgery.folder.routers import is_even, weights_of
from scale_surgery.modeling.expanded_routers import CosineRouter, PosteriorRouter

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import PathCollection
    from matplotlib.figure import Figure

    from scale_surgery.routing.calibration import Calibration
    from scale_surgery.routing.outcome import Outcome

PANEL_WIDTH, HEIGHT = 5.2, 5.0
# margin on each side, as a share of the range
MARGIN = 0.07
# settings that span less of an axis than this get their own panel
SMALL = 0.5
# least range of an axis, in nats per token; smaller differences are not magnified
LEAST_SPREAD = 0.005
# sizes of the first and of the last point of a line
SMALLEST, LARGEST = 10, 46
MARKS: dict[str, dict[str, Any]] = {
    "base": {"marker": "*", "s": 190, "color": INK, "zorder": 4},
    "adapt": {"marker": "s", "s": 70, "color": VERMILION, "zorder": 4},
    "present": {"marker": "D", "s": 110, "facecolor": "none", "edgecolor": INK, "linewidth": 1.4, "zorder": 5},
    "proposed": {"marker": "o", "s": 260, "facecolor": "none", "edgecolor": VERMILION, "linewidth": 2.0, "zorder": 5},
}
DOTTED: dict[str, Any] = {"color": GREY, "linewidth": 1.0, "linestyle": (0, (2, 3)), "zorder": 1}
# most thresholds that label the colour scale
MOST_THRESHOLDS = 18


def calibration_figure(result: Calibration) -> Figure:
    """Draw forgetting against learning, a point per setting. A second panel magnifies crowded settings."""
    from matplotlib.figure import Figure

    everything = [result.base, result.adapt, *result.outcomes]
    panels = [everything]
    if _is_crowded(result.outcomes, everything):
        panels.append(list(result.outcomes))
    figure = Figure(figsize=(PANEL_WIDTH * len(panels), HEIGHT), layout="constrained")
    drawn = figure.subplots(1, len(panels), squeeze=False)[0]
    points = [_draw_panel(axes, result, shown) for axes, shown in zip(drawn, panels, strict=True)]
    figure.axes[0].set_ylabel("learning on new text, nats per token")
    if len(panels) > 1:
        _frame(figure.axes[0], figure.axes[1])
    _draw_legend(figure, len(panels), result)
    if _is_cosine(result):
        _name_thresholds(drawn[-1], points[-1], result.outcomes)
    return figure


def _is_cosine(result: Calibration) -> bool:
    return isinstance(result.present.routing, CosineRouter)


def _is_crowded(outcomes: Sequence[Outcome], everything: Sequence[Outcome]) -> bool:
    pairs = zip(_limits(outcomes), _limits(everything), strict=True)
    return any(part[1] - part[0] < SMALL * (whole[1] - whole[0]) for part, whole in pairs)


def _limits(outcomes: Sequence[Outcome]) -> list[tuple[float, float]]:
    """Return the limits of both axes."""
    ends = []
    for values in ([outcome.forgetting for outcome in outcomes], [outcome.learning for outcome in outcomes]):
        low, high = min(values), max(values)
        spread = max(high - low, LEAST_SPREAD)
        ends.append((low - MARGIN * spread, low + (1 + MARGIN) * spread))
    return ends


def _draw_panel(axes: Axes, result: Calibration, shown: Sequence[Outcome]) -> PathCollection:
    """Draw settings, and return the points of the last line."""
    across, up = _limits(shown)
    axes.set_xlim(*across)
    axes.set_ylim(*up)
    axes.set_xlabel("forgetting on old text, nats per token")
    tidy(axes)
    for label, colours, line in _lines(result):
        x, y = [outcome.forgetting for outcome in line], [outcome.learning for outcome in line]
        sizes = [SMALLEST + (LARGEST - SMALLEST) * place / max(1, len(line) - 1) for place in range(len(line))]
        axes.plot(x, y, color=GREY if _is_cosine(result) else colours[0], linewidth=1.0, zorder=2)
        points = axes.scatter(
            x, y, s=sizes, c=colours, cmap="viridis" if _is_cosine(result) else None, zorder=3, label=label
        )
    for name, label in _labels(result).items():
        outcome: Outcome = getattr(result, name)
        if outcome in shown:
            axes.scatter(outcome.forgetting, outcome.learning, label=label, **MARKS[name])
    if across[0] <= result.most_forgetting <= across[1]:
        axes.axvline(result.most_forgetting, label=f"maximum forgetting {result.most_forgetting:g}", **DOTTED)
    return points


def _lines(result: Calibration) -> Iterator[tuple[str, Any, list[Outcome]]]:
    """Yield the lines: label, colours and settings.

    The weight of the preserve path falls along a line. The cosine router has one line, coloured by threshold.
    """
    from matplotlib import colormaps

    if _is_cosine(result):
        yield "thresholds, larger points: higher", range(len(result.outcomes)), list(result.outcomes)
        return
    rates = sorted({_line_of(outcome)[0] for outcome in result.outcomes})
    for (rate, is_alike), some in groupby(result.outcomes, key=_line_of):
        colour = colormaps["viridis"](0.92 * rates.index(rate) / max(1, len(rates) - 1))
        # one legend entry per colour; matplotlib skips labels that start with an underscore
        yield f"{'' if is_alike else '_'}switch rate {rate:g}", [colour], list(some)[::-1]


def _line_of(outcome: Outcome) -> tuple[float, bool]:
    """Return the switch rate, and True if all expansions of a composed model have equal prior weights."""
    routing = outcome.routing
    assert isinstance(routing, PosteriorRouter)
    return routing.switch_rate, is_even(weights_of(routing)[1:])


def _labels(result: Calibration) -> dict[str, str]:
    """Return the legend label of each special outcome, by its name."""
    return {
        "base": "base model",
        "adapt": "best path alone" if result.has_several else "adapt path alone",
        "present": f"present: {result.present.numbers}",
        "proposed": f"best: {result.proposed.numbers}",
    }


def _frame(axes: Axes, closer: Axes) -> None:
    """Draw the frame of a magnified panel into the other panel."""
    from matplotlib.patches import Rectangle

    (left, right), (bottom, top) = closer.get_xlim(), closer.get_ylim()
    axes.add_patch(Rectangle((left, bottom), right - left, top - bottom, fill=False, edgecolor=GREY, linewidth=0.8))
    closer.set_title("magnified frame of the left panel", fontsize=9, color=GREY)


def _draw_legend(figure: Figure, panels: int, result: Calibration) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    options: dict[str, Any] = {"ncols": 2 * panels}
    if not _is_cosine(result):
        whose = " of the base" * result.has_several
        options = {"ncols": 3, "title": f"larger points: lower prior{whose}", "title_fontsize": 8}
    figure.legend(handles, labels, loc="outside lower center", frameon=False, fontsize=8, markerscale=0.65, **options)


def _name_thresholds(axes: Axes, points: PathCollection, outcomes: Sequence[Outcome]) -> None:
    """Label the colour scale with thresholds, evenly spaced ones if there are many."""
    count = min(len(outcomes), MOST_THRESHOLDS)
    named = [round(place * (len(outcomes) - 1) / max(1, count - 1)) for place in range(count)]
    bar = axes.figure.colorbar(points, ax=axes, ticks=named, label="threshold", pad=0.02, aspect=40)
    bar.ax.set_yticklabels([outcomes[place].numbers.removeprefix("threshold ") for place in named], fontsize=8)
    bar.ax.tick_params(length=0)
    bar.outline.set_visible(False)
