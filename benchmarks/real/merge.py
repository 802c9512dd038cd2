"""`merge` beside its floors: the bytes of the two models, and a copy of the base with one load of each form.

    python -m benchmarks.real.merge EXPANDED

peak    most resident memory of the process, mapped files included, against the bytes of both models on disk
time    processor time, imports included, against a process that copies the base and loads each form once

Linux only.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import click

from benchmarks.pipeline import measure as measure_process
from scale_surgery.checkpoint.folder import open_checkpoint

PEAK_TARGET = 1.3


def measure(expanded: Path) -> list[tuple[str, float, float, float]]:
    """Merge and take apart again: work, ours, peer and ratio, in GB and in seconds of processor time."""
    with tempfile.TemporaryDirectory(dir=expanded.resolve().parent) as folder:
        fused, blocks, copy = (Path(folder, name) for name in ("fused", "blocks", "copy"))
        merge = ("-m", "scale_surgery", "merge", "-q")
        merged = _run(*merge, str(expanded), "-o", str(fused))
        floor = _run("-m", "benchmarks.real.merge", str(expanded), "--floor", str(fused), str(copy))
        apart = _run(*merge, str(fused), "-o", str(blocks), "--to", "blocks")
        models = (_bytes(expanded) + _bytes(fused)) / 1e9
    peaks = [("peak of merge", merged[0]), ("peak of merge --to blocks", apart[0])]
    rows = [(work, peak, models, peak / models) for work, peak in peaks]
    return [*rows, ("time of merge", merged[1], floor[1], merged[1] / floor[1])]


def _run(*arguments: str) -> tuple[float, float]:
    """Run Python with these arguments; gives its peak in GB and its processor time."""
    used = measure_process([sys.executable, *arguments], " ".join(arguments))
    if used.exit_code:
        raise click.ClickException(f"{used.command}: exit code {used.exit_code}")
    return used.peak_rss_bytes / 1e9, used.processor_seconds


def _bytes(folder: Path) -> int:
    return sum(info.bytes for info in open_checkpoint(folder).tensors.values())


def run_floor(expanded: Path, fused: Path, copy: Path) -> None:
    """Copy the base, and load each form once."""
    from transformers import AutoModelForCausalLM

    from scale_surgery import modeling

    copy.mkdir()
    for shard in open_checkpoint(expanded).shards:
        shutil.copyfile(expanded / shard, copy / shard)
    modeling.register()
    for path in (expanded, fused):
        AutoModelForCausalLM.from_pretrained(path, dtype="auto")


@click.command()
@click.argument("expanded", type=click.Path(exists=True, path_type=Path))
@click.option("--floor", type=click.Path(path_type=Path), nargs=2, help="Run the floor alone: the fused form, a copy.")
def main(expanded: Path, floor: tuple[Path, Path] | None) -> None:
    """Print peak and processor time of merge beside their floors."""
    if floor:
        run_floor(expanded, *floor)
        return
    for work, ours, peer, ratio in measure(expanded):
        click.echo(f"{work}: {ours:.2f}, floor {peer:.2f}, {ratio:.2f} x")


if __name__ == "__main__":
    main()
