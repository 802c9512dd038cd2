"""Memory and time of `train` on texts of a few megabytes and of a gigabyte: tokens made, and tokens found.

The shipped model is expanded and trained for STEPS steps on biographies of people who do not exist, as JSON lines or as
one file of plain text. Each run is a process of its own; see `pipeline` for what its numbers count.

in memory   tokens are made and stay in memory, as for all texts below 64 MiB
made        tokens are made and written into a cache on disk
found       the same command again, into another folder
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.pipeline import Measurement, measure
from scale_surgery import Request, expand
from scale_surgery.biographies import SHIPPED_MODEL, biography, people

MIB = 2**20
STEPS = 2
PEOPLE, STYLES = 2000, 4
FORMS = ("jsonl", "txt")


@dataclass(frozen=True)
class Run:
    """One run of `train`.

    Attributes:
        form: How the text is written: a suffix.
        mebibytes: Its size.
        way: "in memory", "made" or "found".
        measured: What it took.
        cache_bytes: What lies in the cache afterwards.
    """

    form: str
    mebibytes: int
    way: str
    measured: Measurement
    cache_bytes: int


def sentences(seed: int = 0) -> Iterator[str]:
    """Biographies, each followed by a number, without end."""
    texts = [biography(person, style) for person in people(PEOPLE) for style in range(STYLES)]
    draw = random.Random(seed)
    while True:
        yield f"{draw.choice(texts)} {draw.randrange(10**9)}"


def write_corpus(file: Path, size: int) -> Path:
    """Write a text of about so many bytes, in the form that the suffix of the file says."""
    with file.open("w", encoding="utf-8") as stream:
        for text in sentences():
            stream.write(json.dumps({"text": text}) + "\n" if file.suffix == ".jsonl" else text + "\n")
            if stream.tell() >= size:
                return file
    return file


def train_once(expanded: Path, corpus: Path, output: Path, options: Sequence[str]) -> Measurement:
    """Run `train` as a process of its own; the output folder goes."""
    command = [
        *(sys.executable, "-m", "scale_surgery", "train", str(expanded), "--data", str(corpus), "-o", str(output)),
        *("--steps", str(STEPS), "--set", "warmup=0", "--device", "cpu", "--base-weights", "link", "--json", *options),
    ]
    measured = measure(command, "train")
    if measured.exit_code:
        raise SystemExit(f"{corpus}: train ended with {measured.exit_code}.")
    shutil.rmtree(output)
    return measured


def run_size(expanded: Path, folder: Path, form: str, mebibytes: int, *, in_memory: bool) -> Iterator[Run]:
    """Train on a text of one size, twice where its tokens are kept."""
    corpus, cache = write_corpus(folder / f"corpus.{form}", mebibytes * MIB), folder / "cache"
    for way in ("in memory",) if in_memory else ("made", "found"):
        options = [] if in_memory else ["--cache-dir", str(cache)]
        measured = train_once(expanded, corpus, folder / "out", options)
        kept = sum(file.stat().st_size for file in cache.rglob("*.arrow"))
        yield Run(form, mebibytes, way, measured, kept)
    corpus.unlink()
    shutil.rmtree(cache, ignore_errors=True)


def render(runs: Sequence[Run]) -> Table:
    """Lay out the runs as a table."""
    table = Table(box=SIMPLE_HEAD)
    for column in ("text", "tokens", "seconds", "peak RSS", "peak anonymous", "cache"):
        table.add_column(column, justify="left" if column in ("text", "tokens") else "right")
    for run in runs:
        sizes = (run.measured.peak_rss_bytes, run.measured.peak_anonymous_bytes, run.cache_bytes)
        shown = [f"{size / MIB:,.0f} MiB" for size in sizes]
        table.add_row(f"{run.mebibytes:,} MiB {run.form}", run.way, f"{run.measured.seconds:.1f}", *shown)
    return table


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--size", "sizes", multiple=True, type=int, default=(16, 128, 1024), help="MiB of text; can be repeated.")
@click.option("--in-memory", "whole", multiple=True, type=int, default=(16,), help="MiB of text kept in memory.")
@click.option("--form", "forms", multiple=True, type=click.Choice(FORMS), default=FORMS)
def main(folder: Path, sizes: tuple[int, ...], whole: tuple[int, ...], forms: tuple[str, ...]) -> None:
    """Measure `train` in FOLDER, which must not exist and is removed afterwards."""
    folder.mkdir()
    expanded = expand(SHIPPED_MODEL, Request("2-3"), folder / "wide").path
    asked = [(form, size, True) for form in forms for size in whole]
    asked += [(form, size, False) for form in forms for size in sizes]
    runs: list[Run] = []
    for form, size, in_memory in asked:
        for run in run_size(expanded, folder, form, size, in_memory=in_memory):
            runs.append(run)
            Console(stderr=True).print(render(runs[-1:]))
    Console(width=100).print(render(runs))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
