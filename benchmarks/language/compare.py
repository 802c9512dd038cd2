"""A second language, in small: a base that reads English learns another language; what does it still know?

    python -m benchmarks.language WORK [--size 6m] [--second de] [--tokens 1500000] [--seeds 2] [--jobs 2]

Text is fetched from Debian's documentation packages, a base is trained, and every method learns the second language
on the same text: without rehearsal, with rehearsal of samples that the base wrote, and of a hundredth of the text that
it was trained on. Expansions are scored with a router as well. Learning rates are swept in steps of three on a quarter
of the tokens without rehearsal, and the lowest is taken that learns within 0.05 nats of the best on the development
split; the sweep widens until that is not at its edge. Rehearsal takes the same rate. A run that ends becomes a line of
the records file, and what has a line is not run again. What is in WORK (packages, text, base, samples of the base) is
made once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import get_args

import click
import torch

from benchmarks.harness import Records, sweep
from benchmarks.language.base import SIZES, make_base
from benchmarks.language.methods import Method, methods_for
from benchmarks.language.packages import LEARNED
from benchmarks.language.parallel import write_pairs
from benchmarks.language.runs import Key, Place, Rehearse, Run, Subject, run, run_base
from benchmarks.language.text import write_texts

RECORDS = Path(__file__).with_name("runs.jsonl")
SWEPT_SHARE = 0.25
STEP = 3.0
# nats per token; of rates that learn as much the lowest is taken, because it forgets less
TIE = 0.05


def prepare(work: Path, subject: Subject) -> None:
    """Make what all runs share."""
    write_texts(work, subject.second)
    write_pairs(work, subject.second)
    place = Place(work, subject)
    for rehearse in ("own", "own x4"):
        place.rehearsal(rehearse, 0)


@lru_cache(maxsize=1)
def place_of(work: Path, subject: Subject) -> Place:
    """The base and its texts, once in a process."""
    torch.set_num_threads(1)
    return Place(work, subject)


def sweep_rates(work: Path, records: Path, subject: Subject, name: str, tokens: int) -> float:
    """Run a method at several rates, and choose one."""
    place = place_of(work, subject)
    method = method_of(place, name)

    def run_at(power: int) -> Run:
        key = Key(subject, name, "none", rate_at(method, power), round(SWEPT_SHARE * tokens), 0)
        return once(place, records, method, key, is_examined=False)

    return choose(sweep(run_at, 0, lambda power: (power - 1, power + 1), choose)).key.rate


def choose(runs: Collection[Run]) -> Run:
    """Choose the lowest rate that learns about as much as the best."""
    best = min(run.points[-1].new for run in runs)
    return min((run for run in runs if run.points[-1].new <= best + TIE), key=lambda run: run.key.rate)


def rate_at(method: Method, power: int) -> float:
    """A rate so many steps above the one that a method begins with."""
    return float(f"{method.rate * STEP**power:.3g}")


def learn(work: Path, records: Path, key: Key) -> Run:
    """Run a method at the rate that was chosen."""
    place = place_of(work, key.subject)
    return once(place, records, method_of(place, key.method), key)


def once(place: Place, records: Path, method: Method, key: Key, *, is_examined: bool = True) -> Run:
    """Return the record of a run, and run it if there is none."""
    return Records(records, Run, describe).once(key, partial(run, place, method, key, is_examined=is_examined))


def describe(done: Run) -> None:
    """Print a line about a run."""
    key, end = done.key, done.points[-1]
    line = f"{key.method:12} {key.rehearse:5} {key.rate:<8g} seed {key.seed} {done.seconds:5.0f} s"
    click.echo(f"{line}  old {end.old:.3f}  new {end.new:.3f}")


def method_of(place: Place, name: str) -> Method:
    """A method by its name."""
    (method,) = (method for method in methods_for(place.base, place.size) if method.name == name)
    return method


@click.command()
@click.argument("work", type=click.Path(path_type=Path, file_okay=False))
@click.option("--size", type=click.Choice(list(SIZES)), default="6m", show_default=True, help="Size of the base.")
@click.option("--second", type=click.Choice(LEARNED), default="de", show_default=True, help="Language that is learned.")
@click.option("--tokens", default=1_500_000, show_default=True, help="Tokens that are learned.")
@click.option("--seeds", type=click.IntRange(min=1), default=2, show_default=True, help="Runs at the rate chosen.")
@click.option("--method", "names", multiple=True, metavar="NAME", help="Method; can be repeated.  [default: all]")
@click.option("--rate", type=float, help="Learning rate, in place of the one that the sweep chooses.")
@click.option("--rehearse", "rehearsed", type=click.Choice(get_args(Rehearse)), multiple=True, help="[default: all]")
@click.option("--rehearsal-weight", "weight", default=1.0, show_default=True, help="Weight of the divergence.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Runs at the same time.")
@click.option("-o", "--records", type=click.Path(path_type=Path, dir_okay=False), default=RECORDS, help="File of runs.")
def main(
    work: Path,
    size: str,
    second: str,
    tokens: int,
    seeds: int,
    names: Sequence[str],
    rate: float | None,
    rehearsed: Sequence[Rehearse],
    weight: float,
    jobs: int,
    records: Path,
) -> None:
    """Fetch text, train a base, run every method, and go on where that stopped."""
    torch.set_num_threads(jobs)
    subject = Subject(size, second)
    prepare(work, subject)
    kept = Records(records, Run)
    if not any(done.key.subject == subject and done.key.method == "base" for done in kept.read()):
        kept.append(run_base(place_of(work, subject)))
    known = [method.name for method in methods_for(make_base(work, size, second), SIZES[size])]
    if foreign := sorted(set(names) - set(known)):
        raise click.UsageError(f"--method {', '.join(foreign)}: expected some of {', '.join(known)}.")
    chosen = [name for name in known if name in (names or known)]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        swept = [pool.submit(sweep_rates, work, records, subject, name, tokens) for name in chosen if rate is None]
        rates = [future.result() for future in swept] or [rate] * len(chosen)
        kinds = [(rehearse, 1.0 if rehearse == "none" else weight) for rehearse in rehearsed or get_args(Rehearse)]
        orders = product(range(seeds), kinds, zip(chosen, rates, strict=True))
        keys = [
            Key(subject, name, kind, learning_rate, tokens, seed, times)
            for seed, (kind, times), (name, learning_rate) in orders
        ]
        for future in [pool.submit(learn, work, records, key) for key in keys]:
            future.result()
