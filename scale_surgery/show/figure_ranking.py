"""The figure of a ranking of layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scale_surgery.drawing.figures import PANEL_SIZE, tidy
from scale_surgery.drawing.palette import BLUE, GREY

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from scale_surgery.training.ranking import Ranking


def ranking_figure(result: Ranking) -> Figure:
    """Draw the change of each layer from left to right, with the proposed layers in another colour and shape."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    width, height = PANEL_SIZE
    figure = Figure(figsize=(width, height + 0.7), layout="constrained")
    axes = figure.subplots()
    # no bars: they would start at zero, and hide small differences between layers
    for name, marker, colour, is_in in (("proposed", "s", BLUE, True), ("other", "o", GREY, False)):
        layers = [layer for layer in result.layers if (layer.layer in result.proposed) is is_in]
        x, y = [layer.layer for layer in layers], [layer.change for layer in layers]
        axes.scatter(x, y, marker=marker, color=colour, label=name)
    axes.set(xlabel="layer", ylabel="|W' - W| / |W|")
    axes.margins(y=0.12)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    tidy(axes)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure
