"""What methods learn and forget on a real base, Gemma 3 270M.

    make real-model
    python -m benchmarks.gemma .real/gemma-3-270m WORK

README.md beside this file says what is learned and what was asked before the first run. Rows are done in the order of
`methods.METHODS`, each at its first rate first. A run that ends becomes a line of runs.jsonl; interrupt at any time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import click
import torch
from transformers.utils import logging

from benchmarks.gemma.methods import METHODS, Method
from benchmarks.gemma.runs import Key, Place, Run, Scores, Settings, run, run_base
from benchmarks.harness import Records
from scale_surgery import register


def keys(settings: Settings, seeds: int) -> Iterator[tuple[Method, Key]]:
    """Yield what is to run: all rows at their first rate, then at the others, then with other seeds."""
    for seed in range(seeds):
        for place in range(max(len(method.rates) for method in METHODS)):
            for method in METHODS:
                for rate in method.rates[place : place + 1]:
                    yield method, Key(method.name, method.rehearses, rate, seed, settings)


def describe(done: Run) -> str:
    """Describe a run in a line."""
    key = done.key
    return (
        f"{key.method:14}{'own samples' if key.rehearses else '':12} {key.rate:<7g} seed {key.seed}  "
        f"{told(done.scores)}  {done.step_seconds:.1f} s  {done.peak_bytes / 1e9:.1f} GB  {done.hours:.2f} h"
        + (f"  routed: {told(done.routed)}" if done.routed else "")
    )


def told(scores: Scores) -> str:
    """Describe scores."""
    kept = "  ".join(f"{group} {share:.1%}" for group, share in scores.kept.items())
    return f"people {scores.people:.1%}  second {scores.second:.3f}  english {scores.english:.3f}  {kept}"


@click.command()
@click.argument("base", type=click.Path(exists=True, path_type=Path, file_okay=False))
@click.argument("work", type=click.Path(path_type=Path, file_okay=False))
@click.option("--method", "names", multiple=True, help="Default: all.")
@click.option("--rate", "rates", multiple=True, type=float, help="Default: all.")
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--runs", "most", type=click.IntRange(min=1), help="End after so many runs.")
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path(__file__).with_name("runs.jsonl"),
    help="Records, one line for each run. Default: runs.jsonl beside this file.",
)
def main(
    base: Path,
    work: Path,
    names: tuple[str, ...],
    rates: tuple[float, ...],
    seeds: int,
    most: int | None,
    threads: int,
    output: Path,
) -> None:
    """Teach BASE, and ask what it learned and what it forgot. Texts and samples go to WORK."""
    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    register()
    settings = Settings()
    records = Records(output, Run, lambda done: click.echo(describe(done)))
    place = Place(base, work, settings)
    for samples in (False, True):
        name = "base, sampled" if samples else "base"
        if not names or name in names:
            records.once(Key(name, False, 0.0, 0, settings), partial(run_base, place, samples=samples))
    done = {run.key for run in records.read()}
    left = [
        (method, key)
        for method, key in keys(settings, seeds)
        if (not names or method.name in names) and (not rates or key.rate in rates) and key not in done
    ]
    for method, key in left[:most]:
        records.once(key, partial(run, place, method, key))


if __name__ == "__main__":
    main()
