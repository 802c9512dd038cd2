"""What keeping freed memory saves in a training step on the CPU. glibc only.

    python -m benchmarks.allocator --pairs 5

Two processes take turns: one trains with the malloc of glibc as it is, one after `keep_freed_memory`. A step is forward
with labels, backward, AdamW and zero_grad of an expanded model (`preserve`), as in `benchmarks.training_cost`.

processor  processor seconds of a step, median over the steps of a process
faults     pages that the system had to hand out in a step
peak       most memory of the process
ratio      as it is / kept, of a pair; the median over pairs, the least and the most
"""

from __future__ import annotations

import json
import resource
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import click
import torch
from rich.console import Console
from rich.table import Table

from benchmarks import make_checkpoint
from benchmarks.device import timed
from benchmarks.make_checkpoint import SHAPES
from benchmarks.training_cost import Settings, load, make_step
from scale_surgery import Request, expand
from scale_surgery.training.allocator import keep_freed_memory

WARM_UP = 2


@dataclass(frozen=True)
class Steps:
    """What the steps of a process took: processor seconds and page faults of a step, peak memory in bytes."""

    is_kept: bool
    processor_seconds: float
    faults: float
    peak_bytes: int


def train_steps(folder: Path, settings: Settings, *, is_kept: bool) -> Steps:
    """Take some steps in this process, which must be a fresh one."""
    torch.set_num_threads(settings.threads)
    if is_kept and not keep_freed_memory():
        raise RuntimeError("this process has no glibc, or its environment says what malloc does")
    step = make_step(load(folder, "preserve", settings.device), "preserve", settings)
    for _ in range(WARM_UP):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    taken = [timed(step, settings)[1] for _ in range(settings.rounds)]
    used = resource.getrusage(resource.RUSAGE_SELF)
    return Steps(is_kept, median(taken), (used.ru_minflt - before) / settings.rounds, used.ru_maxrss * 1024)


def measure(settings: Settings, pairs: int) -> list[tuple[Steps, Steps]]:
    """Let processes take turns; gives pairs of as it is, and kept. Every second pair begins with the other one."""
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_checkpoint.make_checkpoint(folder / "base", SHAPES[settings.shape], dtype=torch.float32)
        expand(folder / "base", Request("all", init_w21="random"), folder / "preserve")
        step_pairs = []
        for turn in range(pairs):
            order = (False, True) if turn % 2 == 0 else (True, False)
            with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
                two = [pool.submit(train_steps, folder, settings, is_kept=is_kept).result() for is_kept in order]
            step_pairs.append((two[order.index(False)], two[order.index(True)]))
    return step_pairs


def ratios(pairs: Sequence[tuple[Steps, Steps]]) -> list[float]:
    """How many times as much processor time a step takes as it is, of each pair."""
    return [plain.processor_seconds / kept.processor_seconds for plain, kept in pairs]


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="d96", show_default=True)
@click.option("--batch", default=8, show_default=True, help="Sequences of a step.")
@click.option("--length", default=256, show_default=True, help="Tokens of a sequence.")
@click.option("--rounds", default=10, show_default=True, help="Steps of a process that are counted.")
@click.option("--pairs", default=5, show_default=True, help="Pairs of processes.")
@click.option("--threads", default=1, show_default=True, help="Of torch.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the numbers as JSON.")
def main(pairs: int, output: Path | None, **options: object) -> None:
    """Measure what a training step takes with and without the memory that the last one freed."""
    settings = Settings(**options, device="cpu", dtype="float32")  # type: ignore[arg-type]
    step_pairs = measure(settings, pairs)
    table = Table("malloc", "cpu seconds", "faults", "peak")
    for name, side in (("as it is", 0), ("kept", 1)):
        steps = [pair[side] for pair in step_pairs]
        seconds, faults = median(run.processor_seconds for run in steps), median(run.faults for run in steps)
        table.add_row(
            name, f"{seconds:.3f}", f"{faults:,.0f}", f"{max(run.peak_bytes for run in steps) / 2**20:.0f} MiB"
        )
    console, own_ratios = Console(width=120), ratios(step_pairs)
    console.print(table)
    console.print(f"ratio {median(own_ratios):.2f}, {min(own_ratios):.2f} to {max(own_ratios):.2f}")
    if output is not None:
        runs = [[asdict(run) for run in pair] for pair in step_pairs]
        output.write_text(json.dumps({"settings": asdict(settings), "ratios": own_ratios, "pairs": runs}, indent=2))


if __name__ == "__main__":
    main()
