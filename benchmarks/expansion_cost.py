"""What `expand` takes beside PiSSA of peft, which also decomposes the weights that it adapts. Linux only; needs peft.

    python -m benchmarks.expansion_cost --shape 1b --rounds 5 -o numbers.json
    python -m benchmarks.expansion_cost --shape 8b --depth 8 --rounds 3

Whole processes in turn, on a random checkpoint made first: a round is one of each.

expand     scale-surgery expand MODEL --layers last:4, all else as it is by default: the base is copied and hashed, the
           blocks are computed and written
PiSSA      peft, init_lora_weights="pissa_niter_4", on all linears of the same layers, of the rank (a multiple of 8) at
           which it trains about as many parameters; the model is loaded as it is stored, the adapters are saved

processor  user and system seconds of the process from its start to its end, median over the rounds
ratio      processor seconds of expand divided by those of PiSSA in the same round: median, least and most
peak       largest anonymous memory, and the kernel's maximum, which counts pages of mapped weight files too
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import truediv
from pathlib import Path
from statistics import median

import click
from rich.console import Console
from rich.table import Table

from benchmarks.make_checkpoint import SHAPES, tensor_shapes
from benchmarks.pipeline import Measurement, make_base, measure

PISSA = Path(__file__).with_name("pissa.py")
RANK_STEP = 8


@dataclass(frozen=True)
class Ratio:
    """Processor seconds of expand by those of PiSSA, round by round."""

    median: float
    least: float
    most: float


def pissa_rank(shape: str, layers: int, parameters: int) -> int:
    """The rank at which adapters on all linears of some layers have about as many parameters."""
    sizes = (size for name, size in tensor_shapes(SHAPES[shape]).items() if ".layers.0." in name)
    for_one = layers * sum(sum(size) for size in sizes if len(size) == 2)
    return max(1, round(parameters / for_one / RANK_STEP)) * RANK_STEP


def plan_parameters(base: Path, layers: int) -> int:
    """How many parameters `expand` adds, as `plan` says."""
    arguments = ["plan", str(base), "--layers", f"last:{layers}", "--json", "--quiet"]
    planned = measure([sys.executable, "-m", "scale_surgery", *arguments], "plan")
    return int(planned.result["costs"]["parameters_added"])


def programs(base: Path, folder: Path, layers: int, rank: int) -> dict[str, list[str]]:
    """What is measured: name to arguments; each writes a folder of its name."""
    expand = ["-m", "scale_surgery", "expand", str(base), "--layers", f"last:{layers}", "-o", str(folder / "expand")]
    pissa = [str(PISSA), str(base), str(folder / "PiSSA"), "--layers", str(layers), "--rank", str(rank)]
    return {"expand": [sys.executable, *expand, "--json", "--quiet"], "PiSSA": [sys.executable, *pissa]}


def run_rounds(commands: Mapping[str, Sequence[str]], folder: Path, rounds: int) -> dict[str, list[Measurement]]:
    """Run each program in each round, and remove what it wrote."""
    done: dict[str, list[Measurement]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, arguments in commands.items():
            measurement = measure(arguments, name)
            if measurement.exit_code:
                raise RuntimeError(f"{name}: exit code {measurement.exit_code}, expected 0.")
            done[name].append(measurement)
            shutil.rmtree(folder / name)
    return done


def ratio_of(done: Mapping[str, Sequence[Measurement]]) -> Ratio:
    """Compare the two programs within each round."""
    seconds = ([measurement.processor_seconds for measurement in done[name]] for name in ("expand", "PiSSA"))
    ratios = list(map(truediv, *seconds))
    return Ratio(median(ratios), min(ratios), max(ratios))


def render(done: Mapping[str, Sequence[Measurement]]) -> Table:
    """Lay medians out as a table."""
    table = Table("program", "seconds", "processor", "least", "most", "peak anonymous", "peak RSS")
    for name, runs in done.items():
        processor = [run.processor_seconds for run in runs]
        seconds = (median(run.seconds for run in runs), median(processor), min(processor), max(processor))
        memory = (max(run.peak_anonymous_bytes for run in runs), max(run.peak_rss_bytes for run in runs))
        table.add_row(name, *(f"{value:.1f}" for value in seconds), *(f"{size / 2**30:.2f} GiB" for size in memory))
    return table


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="1b", show_default=True)
@click.option("--depth", type=int, help="Layers of the model, instead of the shape's.")
@click.option("--layers", default=4, show_default=True, help="Layers to expand and to adapt, counted from the last.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--threads", default=1, show_default=True, help="Of torch, in both programs.")
@click.option("--work", type=click.Path(path_type=Path, file_okay=False), default=Path("benchmark-work"))
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the numbers as JSON.")
def main(
    shape: str, depth: int | None, layers: int, rounds: int, threads: int, work: Path, output: Path | None
) -> None:
    """Measure expand and PiSSA in turn on a random checkpoint."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    work.mkdir(parents=True)
    try:
        base = make_base(work / "base", shape, ["--layers", str(depth or SHAPES[shape].layers)])
        parameters = plan_parameters(base, layers)
        rank = pissa_rank(shape, layers, parameters)
        done = run_rounds(programs(base, work, layers, rank), work, rounds)
    finally:
        shutil.rmtree(work)
    ratio, console = ratio_of(done), Console(width=120)
    console.print(render(done))
    trained = (
        f"{parameters / 1e6:.1f}M parameters added, PiSSA trains {done['PiSSA'][0].result['parameters'] / 1e6:.1f}M"
    )
    console.print(f"{trained} (rank {rank})")
    console.print(f"ratio of processor seconds: {ratio.median:.3f} ({ratio.least:.3f} to {ratio.most:.3f})")
    if output is not None:
        measurements = {name: [vars(run) for run in runs] for name, runs in done.items()}
        report = {"shape": shape, "depth": depth, "layers": layers, "threads": threads, "rank": rank}
        output.write_text(json.dumps({**report, "ratio": asdict(ratio), "measurements": measurements}, indent=2) + "\n")


if __name__ == "__main__":
    main()
