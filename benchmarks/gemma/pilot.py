"""How many passes, and which rates, teach other people than those of the table? Old abilities are not asked about.

python -m benchmarks.gemma.pilot BASE "grow-freeze" 1e-4
"""

from __future__ import annotations

import time
from pathlib import Path

import click
import torch
from transformers import AutoTokenizer
from transformers.utils import logging

from benchmarks.gemma.methods import METHODS
from benchmarks.gemma.runs import share_of_right
from benchmarks.gemma.texts import paraphrased, people_rows
from benchmarks.harness import learn, stepping
from scale_surgery import register
from scale_surgery.biographies import people
from scale_surgery.training.allocator import keep_freed_memory

# beyond the people of the table and those that its questions show
START = 2200


@click.command()
@click.argument("base", type=click.Path(exists=True, path_type=Path, file_okay=False))
@click.argument("name", type=click.Choice([*dict.fromkeys(method.name for method in METHODS)]))
@click.argument("rate", type=float)
@click.option("--people", "count", type=click.IntRange(min=1), default=12, show_default=True)
@click.option("--passes", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--rows", "size", type=click.IntRange(min=1), default=4, show_default=True, help="Rows in a batch.")
def main(base: Path, name: str, rate: float, count: int, passes: int, size: int) -> None:
    """Teach BASE some people by method NAME at RATE without own samples, and ask about them."""
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    register()
    keep_freed_memory()
    tokenizer = AutoTokenizer.from_pretrained(base)
    group = people(count, start=START)
    method = next(method for method in METHODS if method.name == name)
    model = method.make(base, 0)
    batches = people_rows(tokenizer, group, passes, 0).split(size)
    take_step = stepping(model, rate, len(batches))
    model.train()
    started = time.perf_counter()
    for batch in batches:
        learn(model, batch)
        take_step()
    seconds = (time.perf_counter() - started) / len(batches)
    model.eval()
    share = share_of_right(model, tokenizer, paraphrased(group))["people"]
    click.echo(
        f"{name:12} {rate:g}  {count} people, {passes} passes, {len(batches)} steps of {size} rows: "
        f"{share:.1%} right, {seconds:.1f} s a step"
    )


if __name__ == "__main__":
    main()
