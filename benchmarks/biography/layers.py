"""Where to collaborate, and in which layers: one expansion in all places of the shipped model.

    python -m benchmarks.biography.layers --figure l_fp
    python -m benchmarks.biography.layers --figure norm
    python -m benchmarks.biography.layers --figure chosen

Texts, batches, questions and measures are those of compare.py. Within a figure everything is the same but
the place of what is new, the learning rate included, so that what differs comes from the place:

l_fp       W12 in the layers from L_fp on, in attention alone or in attention and MLP, for every L_fp of the model
norm       L_fp half the layers, W12 in attention alone or in the MLP alone, at several rates: forgetting against the
           norm of W12 at every measured step
chosen     two of the four layers, every pair of them, widened by adapt or grown by grow-freeze; beside them the pairs
           that a pilot of rank_layers on the new texts changes most, for each seed

Runs are lines of the records file and pilots lines of another; what has a line is not run again.
"""

from __future__ import annotations

from pathlib import Path

import click
import torch
from rich.console import Console
from transformers.utils import logging

from benchmarks.biography.compare import QUICK, Bench
from benchmarks.biography.layers_report import (
    CHOSEN_LEGEND,
    NORM_LEGEND,
    depths_legend,
    render_depths,
    render_lines,
    render_norms,
    render_pairs,
    render_proposals,
)
from benchmarks.biography.pilots import keep_proposals
from benchmarks.biography.places import DEPTHS, GROWN, NORM, NORM_RATES, RATE, WIDENED
from benchmarks.biography.runs import Run, Settings
from scale_surgery import register

PAIRS = {"adapt": WIDENED, "grow-freeze": GROWN}


def run_depths(bench: Bench, seeds: int) -> dict[str, dict[int, list[Run]]]:
    """Run every L_fp, by what W12 stands in."""
    return {
        scope: {depth: bench.seeds(method, RATE, seeds) for depth, method in methods.items()}
        for scope, methods in DEPTHS.items()
    }


def run_norms(bench: Bench, seeds: int) -> dict[str, list[Run]]:
    """Run several rates, by what W12 stands in."""
    return {
        scope: [run for rate in NORM_RATES for run in bench.seeds(method, rate, seeds)]
        for scope, method in NORM.items()
    }


def run_pairs(bench: Bench, seeds: int) -> dict[str, dict[tuple[int, ...], list[Run]]]:
    """Run every pair of layers, by how they grow."""
    return {
        name: {pair: bench.seeds(method, method.rate, seeds) for pair, method in methods.items()}
        for name, methods in PAIRS.items()
    }


def show_depths(bench: Bench, seeds: int, images: Path | None) -> None:
    """Run, tabulate and draw forgetting and learning against L_fp."""
    groups = run_depths(bench, seeds)
    bench.console.print(render_depths(groups), depths_legend(groups), sep="\n", highlight=False)
    if images is not None:
        from benchmarks.biography.layers_figures import draw_depths  # matplotlib is needed for figures alone

        bench.console.print(f"drawn: {draw_depths(groups, images)}")


def show_norms(bench: Bench, seeds: int, images: Path | None) -> None:
    """Run, tabulate and draw forgetting against the norm of W12."""
    groups = run_norms(bench, seeds)
    bench.console.print(render_norms(groups), NORM_LEGEND, render_lines(groups), sep="\n", highlight=False)
    if images is not None:
        from benchmarks.biography.layers_figures import draw_norms

        bench.console.print(f"drawn: {draw_norms(groups, images)}")


def show_chosen(bench: Bench, seeds: int, images: Path | None) -> None:
    """Run, tabulate and draw every pair of layers, and what the pilots change most."""
    groups = run_pairs(bench, seeds)
    proposals = keep_proposals(bench.records.with_suffix(".pilots.jsonl"), bench.settings, seeds)
    for name, pairs in groups.items():
        bench.console.print(f"\n{name}", render_pairs(pairs, proposals), sep="\n", highlight=False)
    bench.console.print(CHOSEN_LEGEND, render_proposals(proposals), sep="\n", highlight=False)
    if images is not None:
        from benchmarks.biography.layers_figures import draw_pairs

        bench.console.print(f"drawn: {draw_pairs(groups, proposals, images)}")


FIGURES = {"l_fp": show_depths, "norm": show_norms, "chosen": show_chosen}


@click.command()
@click.option("--figure", type=click.Choice([*FIGURES]), default="l_fp", show_default=True)
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--quick", is_flag=True, help="Four people and eight steps, to see that it works.")
@click.option("--images", type=click.Path(path_type=Path, file_okay=False), help="Draw the figure into this folder.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("biography.jsonl"),
    show_default=True,
    help="Records, one line for each run; pilots go into a file beside it.",
)
def main(figure: str, seeds: int, quick: bool, images: Path | None, output: Path) -> None:
    """Teach the shipped model new people by one expansion in many places, and measure what it learns and forgets."""
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # so that the order of sums does not depend on the number of cores
    register()
    bench = Bench(QUICK if quick else Settings(), output, Console(width=80))
    if images is not None:
        images.mkdir(parents=True, exist_ok=True)
    FIGURES[figure](bench, seeds, images)


if __name__ == "__main__":
    main()
