"""`expand` beside its floors, and its peak memory beside what `plan` says.

    python -m benchmarks.real.expand BASE

expand        against imports, one load of the tokenizer, copy and hash of the same bytes, and the same new tensors
new tokens    against imports, one load, `add_tokens` and one write of the tokenizer, copy and hash of the same bytes
memory        peak resident memory, mapped files included, against the forecast: 1 is exact, more is too little said

Each is a process of its own, and processor time is compared. Linux only.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import click

from benchmarks.pipeline import Measurement
from benchmarks.pipeline import measure as measure_process

# 20 words, none of them a token
WORDS = [f"zorbified{number}" for number in range(20)]
# options of more expansions whose memory is compared
OTHERS = (
    ("--layers", "0-17", "--up-width", "256"),
    ("--layers", "last:4", "--method", "grow"),
    ("--layers", "last:4", "--method", "depth"),
)

Row = tuple[str, float, float, float]


def measure(base: Path) -> list[Row]:
    """Expand, and expand by new tokens alone: work, ours, peer and ratio, in seconds of processor time and in GB."""
    with tempfile.TemporaryDirectory() as folder:
        words, wide, longer, copy = (Path(folder, name) for name in ("words.txt", "wide", "longer", "copy"))
        words.write_text("\n".join(WORDS))
        options = ["--layers", "last:4"]
        expanded = run("-m", "scale_surgery", "expand", str(base), *options, "-o", str(wide), "-q")
        floor = run("-m", "benchmarks.real.expand", str(base), "--floor", str(wide), str(copy))
        shutil.rmtree(copy)
        rows = [_row("expand --layers last:4", expanded.processor_seconds, floor.processor_seconds)]
        rows += [_memory(base, options, expanded)]
        options = ["--layers", "none", "--new-tokens", str(words)]
        added = run("-m", "scale_surgery", "expand", str(base), *options, "-o", str(longer), "-q")
        floor = run("-m", "benchmarks.real.expand", str(base), "--floor-tokens", str(words), str(copy))
        rows += [_row("expand --new-tokens, 20 words", added.processor_seconds, floor.processor_seconds)]
        return [*rows, _memory(base, options, added)]


def measure_memory(base: Path) -> list[Row]:
    """Compare peak and forecast of more expansions, in GB."""
    rows = []
    for options in OTHERS:
        with tempfile.TemporaryDirectory() as folder:
            used = run("-m", "scale_surgery", "expand", str(base), *options, "-o", str(Path(folder, "wide")), "-q")
        rows.append(_memory(base, options, used))
    return rows


def _memory(base: Path, options: list[str] | tuple[str, ...], used: Measurement) -> Row:
    planned = run("-m", "scale_surgery", "plan", str(base), *options, "--json", "-q")
    forecast = planned.result["costs"]["peak_memory_bytes"]
    shown = " ".join(option for option in options if "/" not in option)
    return _row(f"memory of expand {shown}", used.peak_rss_bytes / 1e9, forecast / 1e9)


def _row(work: str, ours: float, peer: float) -> Row:
    return work, ours, peer, ours / peer


def run(*arguments: str) -> Measurement:
    """Run Python with these arguments, and refuse a process that fails."""
    used = measure_process([sys.executable, *arguments], " ".join(arguments))
    if used.exit_code:
        raise click.ClickException(f"{used.command}: exit code {used.exit_code}")
    return used


def run_floor(base: Path, expanded: Path, copy: Path) -> None:
    """Load the tokenizer, copy and hash the base, and make and write the new tensors of an expansion."""
    from transformers import AutoTokenizer, PreTrainedModel  # noqa: F401

    from scale_surgery.checkpoint.files import write_tensors
    from scale_surgery.checkpoint.folder import open_checkpoint
    from scale_surgery.folder.record import read_manifest
    from scale_surgery.tensors.initialise import Initialiser

    AutoTokenizer.from_pretrained(base)
    _copy_and_hash(base, copy)
    plan = read_manifest(expanded).first_plan
    initialiser = Initialiser(plan, open_checkpoint(base))
    for shard in plan.shards:
        planned = [tensor for tensor in plan.tensors if tensor.shard == shard]
        write_tensors(copy / shard, {plan.stored_name(tensor.name): initialiser.make(tensor) for tensor in planned})


def run_floor_of_tokens(base: Path, words: Path, copy: Path) -> None:
    """Load the tokenizer, add words and write it, and copy and hash the base."""
    from transformers import AutoTokenizer, PreTrainedModel  # noqa: F401

    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(words.read_text().split())
    _copy_and_hash(base, copy)
    tokenizer.save_pretrained(copy)


def _copy_and_hash(base: Path, copy: Path) -> None:
    from scale_surgery.checkpoint.files import take_over
    from scale_surgery.checkpoint.folder import open_checkpoint
    from scale_surgery.checkpoint.hashes import hash_all

    copy.mkdir()
    names = [file.name for file in base.iterdir() if file.is_file()]
    for name in names:
        take_over(base / name, copy / name, "auto")
    hash_all(open_checkpoint(copy), names)


@click.command()
@click.argument("base", type=click.Path(exists=True, path_type=Path))
@click.option("--memory", is_flag=True, help="Compare memory of more expansions.")
@click.option("--floor", type=click.Path(path_type=Path), nargs=2, help="Run the floor alone: EXPANDED, a copy.")
@click.option("--floor-tokens", type=click.Path(path_type=Path), nargs=2, help="Run this floor alone: WORDS, a copy.")
def main(base: Path, memory: bool, floor: tuple[Path, Path] | None, floor_tokens: tuple[Path, Path] | None) -> None:
    """Print times and memory of expand beside their floors and forecasts."""
    if floor:
        run_floor(base, *floor)
    elif floor_tokens:
        run_floor_of_tokens(base, *floor_tokens)
    else:
        for work, ours, peer, ratio in measure_memory(base) if memory else measure(base):
            click.echo(f"{work}: {ours:.2f}, peer {peer:.2f}, {ratio:.2f} x")


if __name__ == "__main__":
    main()
