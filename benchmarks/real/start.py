"""`inspect` and `plan` beside importing transformers and torch, and `--help` beside nothing.

    python -m benchmarks.real.start BASE

imports    `import torch, transformers`, where transformers puts off its own modules until one is asked for
model      the same with `from transformers import PreTrainedModel`, without which no model can be looked at

Each is a process of its own, and processor time is compared. Linux only.
"""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.real.expand import Row, run

IMPORTS = "import torch, transformers"
MODEL = f"{IMPORTS}; from transformers import PreTrainedModel"


def measure(base: Path) -> list[Row]:
    """Measure each command and its floors: work, seconds of ours, seconds of the floor, and the ratio."""
    run("-c", MODEL)
    floors = {name: run("-c", code).processor_seconds for name, code in (("imports", IMPORTS), ("model", MODEL))}
    ours = {
        "inspect": run("-m", "scale_surgery", "inspect", str(base), "-q").processor_seconds,
        "plan": run("-m", "scale_surgery", "plan", str(base), "--layers", "last:4", "-q").processor_seconds,
        "--help": run("-m", "scale_surgery", "--help").processor_seconds,
    }
    return [
        (f"{work} beside {name}", seconds, floor, seconds / floor)
        for work, seconds in ours.items()
        for name, floor in floors.items()
    ]


@click.command()
@click.argument("base", type=click.Path(exists=True, path_type=Path))
def main(base: Path) -> None:
    """Print the processor time of commands beside that of imports."""
    for work, ours, floor, ratio in measure(base):
        click.echo(f"{work}: {ours:.2f} s, floor {floor:.2f} s, {ratio:.2f} x")


if __name__ == "__main__":
    main()
