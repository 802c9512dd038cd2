"""Every benchmark that says something about a GPU, one after the other, for whoever has one.

    python -m benchmarks.on_gpu FOLDER
    python -m benchmarks.on_gpu FOLDER --only routing
    python -m benchmarks.on_gpu FOLDER --device cpu --dtype float32 --quick     # a trial without a GPU

FOLDER gets NAME.json and NAME.md for each benchmark, and machine.json. Each is a process of its own, which is ended
after LIMIT seconds; one that fails does not keep the others from running.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.make_checkpoint import SHAPES

LIMIT = 600
PACKAGES = ("torch", "transformers", "accelerate", "peft", "safetensors")


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: its module, options of its own, and minutes that it may take with a 1B shape; an estimate."""

    module: str
    options: tuple[str, ...]
    minutes: int


BENCHMARKS = {
    "training": Benchmark("benchmarks.training_cost", ("--batch", "4", "--length", "1024"), 4),
    "inference": Benchmark("benchmarks.inference", (), 7),
    "routing": Benchmark("benchmarks.routing_cost", ("--rounds", "10"), 8),
}


def command(name: str, folder: Path, given: Sequence[str]) -> list[str]:
    """What runs a benchmark, and writes its numbers into a folder."""
    chosen = BENCHMARKS[name]
    files = ["-o", str(folder / f"{name}.json"), "--markdown", str(folder / f"{name}.md")]
    return [sys.executable, "-m", chosen.module, *chosen.options, *given, *files]


def run(name: str, folder: Path, given: Sequence[str]) -> bool:
    """Run one benchmark; gives whether it ended well."""
    click.echo(f"{name}: {BENCHMARKS[name].minutes} minutes with a 1B shape, more or less (not measured yet)")
    start = time.monotonic()
    try:
        code = subprocess.run(command(name, folder, given), timeout=LIMIT, check=False).returncode
    except subprocess.TimeoutExpired:
        code = None
    ended = {0: "done", None: f"ended after {LIMIT} seconds"}.get(code, f"failed, exit code {code}")
    click.echo(f"{name}: {ended}, {time.monotonic() - start:.0f} s")
    return code == 0


def machine(device: str) -> dict[str, Any]:
    """What the numbers were measured on."""
    description: dict[str, Any] = {name: version(name) for name in PACKAGES}
    description |= {"python": platform.python_version(), "processor": platform.machine(), "cuda": torch.version.cuda}
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        description |= {
            "gpu": properties.name,
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
        }
    return description


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--device", default="cuda", show_default=True, help="cuda, or cpu for a trial.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="bfloat16", show_default=True)
@click.option("--shape", type=click.Choice(list(SHAPES)), default="1b", show_default=True)
@click.option("--only", multiple=True, type=click.Choice(list(BENCHMARKS)), help="Default: all; can be repeated.")
@click.option("--quick", is_flag=True, help="A trial in seconds: tiny models and texts, one round.")
def main(folder: Path, device: str, dtype: str, shape: str, only: tuple[str, ...], quick: bool) -> None:
    """Run the benchmarks on a GPU, and write their numbers into FOLDER."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise click.ClickException("torch sees no CUDA device. For a trial on the CPU: --device cpu --quick.")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "machine.json").write_text(json.dumps(machine(device), indent=2) + "\n", encoding="utf-8")
    given = ["--device", device, "--dtype", dtype, "--shape", shape, *(["--quick"] if quick else [])]
    ended = [run(name, folder, given) for name in only or BENCHMARKS]
    sys.exit(0 if all(ended) else 1)


if __name__ == "__main__":
    main()
