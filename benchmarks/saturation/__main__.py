"""Saturation: what a base forgets that is full of facts, and one that is not, with own samples and without.

    python -m benchmarks.saturation WORK

README.md beside this file states the claim, and what would refute it. Bases are trained into WORK, once. A run that
ends becomes a line of the records file, and is not run again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import click
import torch
from transformers.utils import logging

from benchmarks.harness import Records, beside, sweep
from benchmarks.saturation.bases import ARCHITECTURE, LARGER, Base
from benchmarks.saturation.runs import METHODS, Key, Run, Settings, run
from scale_surgery import register

# people of a base that is just full, and how often each is shown to a base
FULL, PASSES = 1000, 200
LEVELS = (0.25, 0.5, 1.0, 2.0, 4.0)
# a method, and if it rehearses own samples
Row = tuple[str, bool]


def rows() -> Iterator[Row]:
    """Yield each method with and without own samples; gates learn from own samples."""
    for rehearses in (True, False):
        for method in METHODS:
            if rehearses or method != "gated":
                yield method, rehearses


def choose(runs: Collection[Run]) -> Run:
    """Choose the run that keeps most at equal learning, on the split for that; else the one that learned most."""
    done = [run for run in runs if run.matched is not None]
    if not done:
        return max(runs, key=lambda run: max(point.new for point in run.points))
    return max(done, key=lambda run: (run.matched.kept, -run.key.rate))  # type: ignore[union-attr]


def describe(done: Run) -> str:
    """Describe a run in a line."""
    key, at = done.key, done.matched
    scores = f"kept {at.kept_test:6.1%} at step {at.step:4.0f}" if at else f"learned {done.points[-1].new:6.1%}"
    own = "own samples" if key.rehearses else "           "
    return (
        f"{key.base.people:5} {key.base.inner_width} {key.method:8} {own} {key.rate:<7g} seed {key.seed} "
        f"{done.seconds:4.0f} s  base {done.base[0]:.1%}  {scores}"
    )


@click.command()
@click.argument("work", type=click.Path(path_type=Path, file_okay=False))
@click.option("--level", "levels", type=float, multiple=True, help="Saturation. Default: all five.")
@click.option("--method", "names", type=click.Choice(list(METHODS)), multiple=True, help="Default: all.")
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="Bases and runs.")
@click.option("--larger", is_flag=True, help="Bases that are larger from the start; full fine-tuning alone.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path(__file__).with_name("runs.jsonl"),
    help="Records, one line for each run. Default: runs.jsonl beside this file.",
)
def main(work: Path, levels: tuple[float, ...], names: tuple[str, ...], seeds: int, larger: bool, output: Path) -> None:
    """Teach new people to bases that know few and many, and ask about the old ones."""
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # so that the order of sums does not depend on the number of cores
    register()
    records = Records(output, Run, lambda done: click.echo(describe(done)))
    work.mkdir(parents=True, exist_ok=True)
    which = [row for row in rows() if (not names or row[0] in names) and (not larger or row[0] == "full")]
    chosen: dict[tuple[float, str, bool], float] = {}
    for seed, level in product(range(seeds), levels or LEVELS):
        base = Base(round(level * FULL), PASSES, LARGER if larger else ARCHITECTURE["intermediate_size"], seed)
        for row in which:
            run_at = partial(_run_at, records, work, base, row, seed)
            if (level, *row) not in chosen:
                begin = METHODS[row[0]][1]
                # a best rate may stand above worse ones, where a sweep from below does not come
                tried = [done for rate in (begin, 10 * begin) for done in sweep(run_at, rate, beside, choose)]
                chosen[level, *row] = choose(tried).key.rate
            run_at(chosen[level, *row])


def _run_at(records: Records[Run], work: Path, base: Base, row: Row, seed: int, rate: float) -> Run:
    method, rehearses = row
    key = Key(base, method, rehearses, rate, seed, Settings())
    return records.once(key, partial(run, key, work))


if __name__ == "__main__":
    main()
