"""Measure plan, expand, verify, merge, extract, apply and strip as whole processes.

Seconds, memory, bytes written. Linux only.

    python benchmarks/pipeline.py --shape 8b --layers 20-31 --base-weights link
    python benchmarks/pipeline.py --shape 1b --layers last:4 --method grow

A random checkpoint is made first, and everything is removed afterwards. Measured for each command:

seconds     from start to end of the process, the interpreter's start included
peak RSS    the kernel's own maximum; counts pages of mapped files, which are page cache and can be dropped
peak anon   largest anonymous memory seen when asked every 20 ms: what the process itself holds
written     bytes that the process caused to be written to disk
new on disk bytes of the folder it made, without files that are hard links to files of the base
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

MAKE_CHECKPOINT = Path(__file__).with_name("make_checkpoint.py")
POLL_SECONDS = 0.02
BLOCK_BYTES = 512  # unit of ru_oublock


@dataclass(frozen=True)
class Measurement:
    """What one process took; see the module for what each number counts."""

    command: str
    exit_code: int
    seconds: float
    processor_seconds: float
    peak_rss_bytes: int
    peak_anonymous_bytes: int
    written_bytes: int
    new_bytes: int
    result: dict[str, Any]


def measure(arguments: Sequence[str], name: str) -> Measurement:
    """Run a command as a process of its own and measure it."""
    with tempfile.TemporaryFile() as output:
        start = time.monotonic()
        process = subprocess.Popen(arguments, stdout=output)
        anonymous = _Watch(process.pid)
        anonymous.start()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - start
        anonymous.join()
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        # what it prints on stdout, taken as JSON where it is
        result = _parse(output.read())
    return Measurement(
        command=name,
        exit_code=process.returncode,
        seconds=seconds,
        processor_seconds=usage.ru_utime + usage.ru_stime,
        peak_rss_bytes=usage.ru_maxrss * 1024,
        peak_anonymous_bytes=anonymous.peak,
        written_bytes=usage.ru_oublock * BLOCK_BYTES,
        # no folder is known here
        new_bytes=0,
        result=result,
    )


class _Watch(threading.Thread):
    """Ask again and again for a process' anonymous memory, until it has none any more."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.status = Path(f"/proc/{pid}/status")
        self.peak = 0

    def run(self) -> None:
        """Keep the largest answer; a process that has ended has no memory."""
        while (held := anonymous_bytes(self.status)) is not None:
            self.peak = max(self.peak, held)
            time.sleep(POLL_SECONDS)


def anonymous_bytes(status: Path) -> int | None:
    """Read a process' anonymous memory from its status file; None when it has ended."""
    try:
        lines = status.read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), None)


def _parse(output: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(output)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def new_bytes(folder: Path, base: Path) -> int:
    """Bytes of a folder's files that are not hard links to files of the base."""
    known = {file.stat().st_ino for file in base.rglob("*")}
    sizes = {file.stat().st_ino: file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    return sum(size for inode, size in sizes.items() if inode not in known)


def is_same_folder(first: Path, second: Path) -> bool:
    """Whether two folders hold the same files: the same inode, or else the same sha256."""
    names = [sorted(file.relative_to(folder) for file in folder.rglob("*")) for folder in (first, second)]
    return names[0] == names[1] and all(_is_same_file(first / name, second / name) for name in names[0])


def _is_same_file(first: Path, second: Path) -> bool:
    return first.is_dir() or first.samefile(second) or _digest(first) == _digest(second)


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def forget_pages(folder: Path) -> None:
    """Drop a folder's files from the page cache, so that the next process reads them from disk."""
    for file in folder.rglob("*.safetensors"):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@dataclass(frozen=True)
class Settings:
    """What is measured: the request, how base files are taken over, and how models are run by verify."""

    layers: str
    method: str
    base_weights: str
    svd: str
    memory: str
    new_tokens: int
    is_cold: bool


def commands(base: Path, folder: Path, settings: Settings) -> dict[str, tuple[list[str], Path | None]]:
    """List the commands to measure, in order: name to arguments and the folder that it makes."""
    expanded, stripped, fused, blocks = (folder / name for name in ("expanded", "stripped", "fused", "blocks"))
    extract, applied = folder / "extract", folder / "applied"
    method_options = ["--set", f"svd={settings.svd}"] if settings.method == "scale" else []
    request = [str(base), "--layers", settings.layers, "--method", settings.method, *method_options]
    weights = ["--base-weights", settings.base_weights]
    check = ["verify", str(expanded), "--base", str(base)]
    probe = ["--memory", settings.memory, "--max-new-tokens", str(settings.new_tokens)]
    merges = {
        "scale": {
            "merge": (["merge", str(expanded), *probe, "-o", str(fused)], fused),
            "merge --to blocks": (["merge", str(fused), "--to", "blocks", "-o", str(blocks)], blocks),
        },
        "grow": {"merge --to stock": (["merge", str(expanded), "--to", "stock", *probe, "-o", str(fused)], fused)},
        # a stock checkpoint already
        "depth": {},
    }
    return {
        "plan": (["plan", *request], None),
        "expand": (["expand", *request, *weights, "-o", str(expanded)], expanded),
        "verify --files-only": ([*check, "--files-only", "--promise", "recoverable"], None),
        "verify --base": ([*check, *probe], None),
        **merges[settings.method],
        "extract": (["extract", str(expanded), "-o", str(extract)], extract),
        "apply": (["apply", str(extract), "--base", str(base), *weights, "-o", str(applied)], applied),
        "strip": (["strip", str(expanded), *weights, "-o", str(stripped)], stripped),
    }


def run_steps(
    steps: Mapping[str, tuple[list[str], Path | None]], base: Path, folder: Path, *, is_cold: bool
) -> list[Measurement]:
    """Run and measure commands, one after the other, until one fails."""
    done: list[Measurement] = []
    for name, (arguments, made) in steps.items():
        # model files are dropped from the page cache
        if is_cold:
            forget_pages(base)
            forget_pages(folder)
        measurement = measure([sys.executable, "-m", "scale_surgery", *arguments, "--json", "--quiet"], name)
        added = new_bytes(made, base) if made is not None and made.exists() else 0
        done.append(replace(measurement, new_bytes=added))
        if measurement.exit_code:
            break
    return done


def make_base(folder: Path, shape: str, options: Sequence[str]) -> Path:
    """Write a random checkpoint, in a process of its own so that this one stays small."""
    subprocess.run([sys.executable, str(MAKE_CHECKPOINT), str(folder), "--shape", shape, *options], check=True)
    return folder


def render(measurements: Sequence[Measurement]) -> Table:
    """Lay the measurements out as a table."""
    table = Table("command", "exit", "seconds", "cpu seconds", "peak RSS", "peak anon", "written", "new on disk")
    for measurement in measurements:
        sizes = (
            measurement.peak_rss_bytes,
            measurement.peak_anonymous_bytes,
            measurement.written_bytes,
            measurement.new_bytes,
        )
        times = (f"{measurement.seconds:.1f}", f"{measurement.processor_seconds:.1f}")
        table.add_row(
            measurement.command, str(measurement.exit_code), *times, *(f"{size / 2**30:.3f} GiB" for size in sizes)
        )
    return table


def show_estimate(console: Console, measurements: Sequence[Measurement]) -> None:
    """Print what the plan had expected of expand beside what it took."""
    by_command = {measurement.command: measurement for measurement in measurements}
    costs = by_command["plan"].result.get("costs")
    if costs and "expand" in by_command:
        expand = by_command["expand"]
        console.print(f"estimated for expand: {costs['peak_memory_bytes'] / 2**30:.2f} GiB")
        console.print(f"measured:             {expand.peak_rss_bytes / 2**30:.2f} GiB, in {expand.seconds:.0f} s")


@click.command()
@click.option("--shape", default="tiny", show_default=True, help="As for make_checkpoint.py.")
@click.option("--model", type=click.Path(path_type=Path, file_okay=False), help="Use this checkpoint instead.")
@click.option("--decay", default=0.0, show_default=True, help="As for make_checkpoint.py.")
@click.option("--layers", default="last:2", show_default=True, help="Layers to expand.")
@click.option("--method", type=click.Choice(["scale", "grow", "depth"]), default="scale", show_default=True)
@click.option("--svd", type=click.Choice(["exact", "fast"]), default="fast", show_default=True)
@click.option("--base-weights", type=click.Choice(["auto", "copy", "link"]), default="link", show_default=True)
@click.option("--memory", default="4GiB", show_default=True, help="verify streams weights above this.")
@click.option("--new-tokens", default=2, show_default=True, help="Tokens that verify generates for each prompt.")
@click.option("--cold", "is_cold", is_flag=True, help="Drop model files from the page cache before each command.")
@click.option("--work", type=click.Path(path_type=Path, file_okay=False), default=Path("benchmark-work"))
@click.option("--keep", is_flag=True, help="Leave the work folder in place.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the numbers as JSON.")
def main(
    shape: str, model: Path | None, decay: float, work: Path, keep: bool, output: Path | None, **settings: Any
) -> None:
    """Measure every step but training on a random checkpoint."""
    console = Console(width=120)
    chosen = Settings(**settings)
    work.mkdir(parents=True)
    try:
        base = model or make_base(work / "base", shape, ["--decay", str(decay)])
        steps = commands(base, work, chosen)
        measurements = run_steps(steps, base, work, is_cold=chosen.is_cold)
        console.print(render(measurements))
        show_estimate(console, measurements)
        is_done = measurements[-1].command == "strip" and measurements[-1].exit_code == 0
        is_same = is_done and is_same_folder(base, work / "stripped")
        console.print(f"stripped model equals the base, byte for byte: {'yes' if is_same else 'NO'}")
        report = {"settings": asdict(chosen), "is_same": is_same, "measurements": [vars(m) for m in measurements]}
        if output is not None:
            output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    finally:
        if not keep:
            shutil.rmtree(work)
    sys.exit(0 if is_same else 1)


if __name__ == "__main__":
    main()
