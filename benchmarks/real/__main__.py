"""Everything that is measured on a real base, each beside what it cannot be faster or smaller than, in one table.

    python -m benchmarks.real MODEL --markdown tables.md

torch is imported as late as can be: the peak of a process counts what its parent held when it began.

Times are processor seconds, but of training steps, which are seconds; sizes are GB. Linux only; about 15 minutes on two
idle cores for Gemma 3 270M.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
from rich.table import Table

from benchmarks.real import expand, merge, samples, start, verify
from benchmarks.real.expand import Row

# most of what the peer takes, by the beginning of a row's name; memory that is forecast is a range
TARGETS = {
    "expand --layers": (0, 1.3),
    "expand --new-tokens": (0, 1.5),
    "memory": (0.75, 1.1),
    "verify": (0, 1.5),
    "step of adapt": (0, 0.9),
    "step of preserve": (0, 0.7),
    "peak of a step": (0, 0.6),
    "inspect": (0, 2),
    "plan": (0, 2),
    "peak of merge": (0, 1.3),
    "own samples": (0, 1.1),
}


def measure(model: Path, folder: Path) -> Iterator[Row]:
    """Measure one work after the other: its name, ours, its peer, and the ratio."""
    adapt = folder / "adapt"
    options = ("--layers", "last:4", "--variant", "adapt", "--base-weights", "link", "-q")
    expand.run("-m", "scale_surgery", "expand", str(model), *options, "-o", str(adapt))
    yield from start.measure(model)
    yield from expand.measure(model)
    yield from expand.measure_memory(model)
    yield from verify.measure(model, adapt)
    yield from merge.measure(adapt)
    yield from samples.measure(model, adapt)
    from benchmarks.real import step

    for cost in step.rows(model, folder):
        yield f"step of {cost.variant}, beside LoRA", cost.seconds, cost.lora_seconds, cost.ratio
        sizes = (cost.peak_bytes / 1e9, cost.lora_peak_bytes / 1e9)
        yield f"peak of a step of {cost.variant}, beside LoRA", *sizes, cost.memory_ratio


def render(rows: list[Row]) -> Table:
    """Lay rows out, each with its target where it has one."""
    table = Table("work", "ours", "peer", "ratio", "target", "reached")
    for work, ours, peer, ratio in rows:
        target = next((target for begin, target in TARGETS.items() if work.startswith(begin)), None)
        shown = ("", "") if target is None else (f"{target[1]}", "yes" if target[0] <= ratio <= target[1] else "NO")
        table.add_row(work, f"{ours:.2f}", f"{peer:.2f}", f"{ratio:.2f}", *shown)
    return table


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path, file_okay=False))
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the numbers as JSON.")
@click.option("--markdown", type=click.Path(path_type=Path, dir_okay=False), help="Write the table as Markdown.")
def main(model: Path, output: Path | None, markdown: Path | None) -> None:
    """Measure all works on MODEL beside their peers."""
    rows = list[Row]()
    with tempfile.TemporaryDirectory(dir=model.resolve().parent) as folder:
        for row in measure(model, Path(folder)):
            click.echo(f"{row[0]}: {row[1]:.2f}, peer {row[2]:.2f}, {row[3]:.2f} x", err=True)
            rows.append(row)
    from benchmarks.device import publish

    publish([render(rows)], {"rows": rows}, output, markdown, width=100)


if __name__ == "__main__":
    main()
