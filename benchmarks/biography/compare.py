"""Continual learning in small: teach the shipped model new people, and see what it still knows of the old ones.

    python -m benchmarks.biography
    python -m benchmarks.biography --figure growing
    python -m benchmarks.biography --figure stream
    python -m benchmarks.biography --figure inits
    python -m benchmarks.biography --figure routed

Task 0 is the people that the shipped model knows, Task 1 people that it has not met: questions with answers, and
biographies in many styles. Every method trains on Task 1 alone, on the same batches; only the learning rate differs.
Measured before, between and after:

accuracy  hard first-token accuracy: one question to each person of Task 0, all questions of Task 1
loss      nats per token of biographies in styles that no training draws, of every fourth person of Task 0 and of
          all of Task 1

Learning rates are swept at the first seed in steps of about 3. Chosen is the lowest rate whose accuracy on Task 1 at
the end is less than one point below the best, because a lower rate forgets less; the sweep widens until that rate is
not at its edge, and then the rate half a step below is tried too. A method that is routed at inference only takes the
rate of the same method without a router: their training is the same.

A run that ends becomes a line of the records file, and what has a line is not run again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

import click
import torch
from rich.console import Console
from transformers import AutoTokenizer
from transformers.utils import logging

from benchmarks.biography.methods import GROWING, INITS, METHODS, PRESERVE, ROUTED, STREAM, Method
from benchmarks.biography.report import LEGEND, STREAM_LEGEND, TARGETS_LEGEND, render, render_targets
from benchmarks.biography.runs import Examination, Run, Settings, run
from benchmarks.harness import Records, beside, sweep
from scale_surgery import register
from scale_surgery.biographies import SHIPPED_MODEL

TIE = 0.01  # accuracies on Task 1 that differ by less count as equal
FIGURES = {"methods": METHODS, "growing": GROWING, "stream": STREAM, "routed": ROUTED}
NAMES = sorted({method.name for methods in FIGURES.values() for method in methods})
QUICK = Settings(new_people=4, steps=8, rows=1, old_questions=24, old_texts=4)


class Bench:
    """Runs, and the records that make a second run of the same unnecessary."""

    def __init__(self, settings: Settings, records: Path, console: Console) -> None:
        self.settings = settings
        self.records = Records(records, Run, lambda done: console.print(describe(done), highlight=False))
        self.examination = Examination(AutoTokenizer.from_pretrained(SHIPPED_MODEL), settings)

    def run(self, method: Method, rate: float, seed: int) -> Run:
        """Return the record of a run, and run it if there is none."""
        key = (method.name, rate, seed, self.settings)
        return self.records.once(key, lambda: run(method, rate, seed, self.examination, self.settings))

    def sweep(self, method: Method) -> Run:
        """Run a method of the first seed at several rates, as the module says; return the run chosen."""
        at_first_seed = partial(self.run, method, seed=0)
        tried = sweep(at_first_seed, method.rate, beside, choose)
        return choose([*tried, at_first_seed(half_a_step_below(choose(tried).rate))])

    def seeds(self, method: Method, rate: float, count: int) -> list[Run]:
        """Run a method at one rate with several seeds."""
        return [self.run(method, rate, seed) for seed in range(count)]


def half_a_step_below(rate: float) -> float:
    """Return 1.7 below 3, and 5.5 below 10."""
    below, _ = beside(rate)
    return float(f"{below * (1.7 if f'{below:.0e}'.startswith('1') else 5.5 / 3):.2g}")


def choose(runs: Collection[Run]) -> Run:
    """Choose the lowest rate that learns all that the method can; see the module for the rule."""
    best = max(run.end.new_accuracy for run in runs)
    return min((run for run in runs if run.end.new_accuracy > best - TIE), key=lambda run: run.rate)


def describe(done: Run) -> str:
    """Say in one line what a run was and what it scored."""
    scores = (100 * done.end.new_accuracy, 100 * done.end.old_accuracy)
    return (
        f"{done.method:26} {done.rate:<7g} seed {done.seed} {done.seconds:3.0f} s "
        "Task 1 {:5.1f} Task 0 {:5.1f}".format(*scores)
    )


def select(methods: Sequence[Method], names: Collection[str]) -> list[Method]:
    """Methods by their names, all if there are none; with a routed one comes what it is compared to."""
    foreign = sorted(set(names) - {method.name for method in methods})
    if foreign:
        raise click.UsageError(f"--method {', '.join(foreign)}: not in this figure; routed methods are in routed.")
    compared = {method.unrouted for method in methods if method.name in names}
    return [method for method in methods if not names or method.name in {*names, *compared}]


def compare(bench: Bench, methods: Sequence[Method], seeds: int) -> dict[str, list[Run]]:
    """Sweep every method, then run it with every seed at the rate chosen; runs by name."""
    groups: dict[str, list[Run]] = {}
    for method in methods:
        rate = groups[method.unrouted][0].rate if method.routes_late else bench.sweep(method).rate
        groups[method.name] = bench.seeds(method, rate, seeds)
    return groups


def compare_inits(bench: Bench, seeds: int) -> dict[str, list[Run]]:
    """Run every initialisation at the rate chosen for the default one; runs by the pair (W21, W22)."""
    rate = bench.sweep(PRESERVE).rate
    return {pair: bench.seeds(method, rate, seeds) for pair, method in INITS.items()}


@click.command()
@click.option("--figure", type=click.Choice([*FIGURES, "inits"]), default="methods", show_default=True)
@click.option(
    "--method", "names", type=click.Choice(NAMES), metavar="NAME", multiple=True, help="Of this figure. Default: all."
)
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="Runs at the rate chosen.")
@click.option("--quick", is_flag=True, help="Four people and eight steps, to see that it works.")
@click.option("--images", type=click.Path(path_type=Path, file_okay=False), help="Draw the figure into this folder.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("biography.jsonl"),
    show_default=True,
    help="Records, one line for each run.",
)
def main(figure: str, names: tuple[str, ...], seeds: int, quick: bool, images: Path | None, output: Path) -> None:
    """Teach the shipped model new people by several methods, and measure what it learns and forgets."""
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # so that the order of sums does not depend on the number of cores
    register()
    console = Console(width=80)
    bench = Bench(QUICK if quick else Settings(), output, console)
    is_inits = figure == "inits"
    groups = compare_inits(bench, seeds) if is_inits else compare(bench, select(FIGURES[figure], names), seeds)
    legend = STREAM_LEGEND if figure == "stream" else LEGEND
    console.print(render(groups, figure), legend, sep="\n", highlight=False)
    if figure == "routed":
        console.print(render_targets(groups), TARGETS_LEGEND, sep="\n", highlight=False)
    done = bench.records.read()
    minutes = sum(record.seconds for record in done) / 60
    console.print(f"{len(done)} runs on record, {minutes:.1f} min of processor time", highlight=False)
    if images is not None:
        from benchmarks.biography import figures as biography_figures  # matplotlib is needed for figures alone

        images.mkdir(parents=True, exist_ok=True)
        console.print(f"drawn: {biography_figures.draw(figure, groups, images)}")


if __name__ == "__main__":
    main()
