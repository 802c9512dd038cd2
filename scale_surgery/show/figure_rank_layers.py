"""A ranking of layers as PNG or SVG: how much each layer changed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from scale_surgery.show.figures import PANEL_SIZE, save_figure, tidy
from scale_surgery.show.palette import BLUE, GREY

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from scale_surgery.training.ranking import Ranking


def plot_ranking(result: Ranking, file: Path) -> None:
    """Draw how much each layer changed."""
    save_figure(ranking_figure(result), file)


def ranking_figure(result: Ranking) -> Figure:
    """The figure of `plot_ranking`: layers from left to right, the proposed ones in another colour and shape."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    width, height = PANEL_SIZE
    figure = Figure(figsize=(width, height + 0.7), layout="constrained")
    axes = figure.subplots()
    # no bars: they would begin at zero, and hide how little layers may differ
    for name, marker, colour, is_in in (("proposed", "s", BLUE, True), ("other", "o", GREY, False)):
        layers = [layer for layer in result.layers if (layer.layer in result.proposed) is is_in]
        axes.scatter(
            [own.layer for own in layers], [own.change for own in layers], marker=marker, color=colour, label=name
        )
    axes.set(xlabel="layer", ylabel="|W' - W| / |W|")
    axes.margins(y=0.12)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    tidy(axes)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure
