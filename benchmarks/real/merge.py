"""`merge` beside its floors: the bytes of the two models, and a copy of the base with one load of each form.

    python -m benchmarks.real.merge EXPANDED

peak    most resident memory of the process, mapped files included, against the bytes of both models on disk
time    processor time, imports included, against a process that copies the base and loads each form once

Linux only.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import click

from benchmarks.real.expand import Row, run
from scale_surgery.checkpoint.folder import open_checkpoint


def measure(expanded: Path) -> list[Row]:
    """Merge and take apart again: work, ours, peer and ratio, in GB and in seconds of processor time."""
    with tempfile.TemporaryDirectory(dir=expanded.resolve().parent) as folder:
        fused, blocks, copy = (Path(folder, name) for name in ("fused", "blocks", "copy"))
        merge = ("-m", "scale_surgery", "merge", "-q")
        merged = run(*merge, str(expanded), "-o", str(fused))
        floor = run("-m", "benchmarks.real.merge", str(expanded), "--floor", str(fused), str(copy))
        apart = run(*merge, str(fused), "-o", str(blocks), "--to", "blocks")
        seconds = (merged.processor_seconds, floor.processor_seconds)
        models = (_bytes(expanded) + _bytes(fused)) / 1e9
    peaks = [("peak of merge", merged.peak_rss_bytes / 1e9), ("peak of merge --to blocks", apart.peak_rss_bytes / 1e9)]
    rows = [(work, peak, models, peak / models) for work, peak in peaks]
    return [*rows, ("time of merge", *seconds, seconds[0] / seconds[1])]


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
