"""Ten tasks in a row: a model is taught one thing after another; what does it still know?

    python -m benchmarks.streams [-o FILE] [--seeds 3] [--tasks 10] [--method NAME] [--rehearse own] [--jobs 1]
    python -m benchmarks.streams.report --images docs/images

The base is the model that ships with the package. It learns six groups of 20 new people and four other kinds of facts,
`tasks.py`, each from its own text alone, and after each it is asked about all tasks so far and about 200 of the people
that it knew. An answer is right when greedy decoding gives all of it.

composed      an expansion for each task, trained from the base, and all of them mixed by the posterior router
one preserve  one expansion that is trained on and on
full, LoRA    the same of the whole model, and of one adapter
LoRA merged   an adapter for each task, trained from the base, and all of them averaged, or merged by TIES

With rehearsal the model that learns writes text before each task, and is asked to stay what it was on it. Rates are
not tuned; full fine-tuning has two. A run that ends becomes a line of the records file, and what has a line is not run
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import click
import torch
from transformers import AutoTokenizer
from transformers.utils import logging

from benchmarks.harness import Records
from benchmarks.streams.learning import Settings
from benchmarks.streams.methods import METHODS
from benchmarks.streams.runs import Key, Run, run
from scale_surgery import register
from scale_surgery.biographies import SHIPPED_MODEL

RECORDS = Path(__file__).with_name("runs.jsonl")
REHEARSED = {"none": False, "own": True}
BY_NAME = {method.name: method for method in METHODS}


def once(records: Path, key: Key) -> None:
    """Run what has no record."""
    Records(records, Run, describe).once(key, partial(_run, key))


def _run(key: Key) -> Run:
    prepare()
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    return run(BY_NAME[key.method], key, tokenizer, partial(click.echo, err=True))


def describe(done: Run) -> None:
    """Print a line about a run."""
    key = done.key
    click.echo(f"{key.method}{', rehearsed' * key.rehearses}, seed {key.seed}: {done.seconds:.0f} s of processor time")


def prepare() -> None:
    """Compute on one thread, so that the order of sums does not depend on the number of cores."""
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    register()


@click.command()
@click.option("-o", "--records", type=click.Path(path_type=Path, dir_okay=False), default=RECORDS, help="File of runs.")
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of each method.")
@click.option("--tasks", type=click.IntRange(1, 10), default=Settings.tasks, show_default=True, help="Tasks in a row.")
@click.option("--method", "names", type=click.Choice(list(BY_NAME)), multiple=True, help="[default: all]")
@click.option("--rehearse", "rehearsed", type=click.Choice(list(REHEARSED)), multiple=True, help="[default: both]")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Runs at the same time.")
def main(records: Path, seeds: int, tasks: int, names: Sequence[str], rehearsed: Sequence[str], jobs: int) -> None:
    """Run every method, and go on where that stopped."""
    orders = product(range(seeds), rehearsed or REHEARSED, names or BY_NAME)
    settings = Settings(tasks=tasks)
    keys = [Key(name, REHEARSED[rehearse], seed, settings) for seed, rehearse, name in orders]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for future in [pool.submit(once, records, key) for key in keys]:
            future.result()
