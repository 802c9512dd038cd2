"""A ranking of layers as PNG: change and effective rank of each layer and matrix, and what W12 is worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery.show.figures import PANEL_SIZE, save_figure, tidy
from scale_surgery.show.palette import BLUE, VERMILION

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from scale_surgery.training.ranking import LayerScore, MatrixScore, Ranking

INK, LIGHT = "#222222", "#B4C8D6"
MARKERS = {"q": "<", "k": ">", "v": "v", "o": "X", "gate": "^", "up_proj": "s", "down": "o"}
MARK: dict[str, Any] = {"s": 16, "facecolor": "white", "edgecolor": INK, "linewidth": 0.8, "zorder": 3}


def plot_ranking(result: Ranking, file: Path) -> None:
    """Draw how much each layer changed, in how many directions, and what W12 of each is worth where that is known.

    Args:
        result: The ranking.
        file: PNG or SVG to be, as its suffix says; replaced where it exists.
    """
    save_figure(ranking_figure(result), file)


def ranking_figure(result: Ranking) -> Figure:
    """The figure of `plot_ranking`: a panel for each score, layers from left to right."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    width, height = PANEL_SIZE
    count = 2 if result.depth is None else 3
    figure = Figure(figsize=(width, height * count + 0.7), layout="constrained")
    panels = figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0]
    chosen = {proposal.score: set(proposal.layers) for proposal in result.proposals}
    _draw_matrices(panels[0], result, lambda matrix: matrix.relative_norm)
    changes = {layer.layer: layer.relative_norm for layer in result.layers}
    _draw_layers(panels[0], changes, chosen["relative-norm"])
    panels[0].set_ylabel("|W' - W| / |W|")
    _draw_matrices(panels[1], result, lambda matrix: matrix.effective_rank / matrix.singular_values)
    ranks = {layer.layer: layer.effective_rank / _most(layer) for layer in result.layers}
    _draw_layers(panels[1], ranks, chosen["effective-rank"])
    panels[1].set_ylabel("effective rank,\nshare of the most")
    for axes in panels[:2]:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    if result.depth is not None:
        worth = {found.layer: found.worth for found in result.depth.layers}
        _draw_bars(panels[2], worth, set(result.depth.proposed))
        panels[2].set_ylabel("worth of W12,\nnats")
    panels[-1].set_xlabel("layer")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    _draw_legend(figure, result)
    figure.align_ylabels()
    return figure


def _most(layer: LayerScore) -> int:
    return sum(matrix.singular_values for matrix in layer.matrices.values())


def _draw_layers(axes: Axes, values: Mapping[int, float], chosen: set[int]) -> None:
    # no bars: they would begin at zero, and hide how little layers may differ
    colours = [BLUE if layer in chosen else LIGHT for layer in values]
    axes.scatter(list(values), list(values.values()), s=70, color=colours, zorder=2)
    axes.margins(y=0.12)
    tidy(axes)


def _draw_bars(axes: Axes, values: Mapping[int, float], chosen: set[int]) -> None:
    colours = [VERMILION if layer in chosen else LIGHT for layer in values]
    axes.bar(list(values), list(values.values()), width=0.6, color=colours, zorder=2)
    tidy(axes)


def _draw_matrices(axes: Axes, result: Ranking, score: Callable[[MatrixScore], float]) -> None:
    for role in result.layers[0].matrices:
        points = [(layer.layer, score(layer.matrices[role])) for layer in result.layers]
        axes.scatter(*zip(*points, strict=True), marker=MARKERS[role], **MARK)


def _draw_legend(figure: Figure, result: Ranking) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(color=BLUE, label="layer, proposed by this score"),
        Patch(color=LIGHT, label="other layer"),
    ]
    if result.depth is not None:
        handles.insert(1, Patch(color=VERMILION, label="layer, proposed for W12"))
    options: dict[str, Any] = {"color": "none", "markerfacecolor": "white", "markeredgecolor": INK, "markersize": 5}
    handles += [Line2D([], [], marker=MARKERS[role], label=role, **options) for role in result.layers[0].matrices]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
