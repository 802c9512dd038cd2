"""All benchmarks of a GPU in one go: on the CPU, with tiny models; what is common to them: options, peaks, tables."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from click.testing import CliRunner, Result
from rich.table import Table

from benchmarks import device, inference, make_checkpoint, on_gpu, routing_cost, training_cost
from benchmarks.device import Place, as_markdown, peak_of
from benchmarks.on_gpu import BENCHMARKS, Benchmark
from scale_surgery.training.allocator import is_glibc, keep_freed_memory

MAINS = {"training": training_cost.main, "inference": inference.main, "routing": routing_cost.main}
CPU = Place("cpu", "float32", 1)


def run(folder: Path, *options: str) -> Result:
    given = [str(folder), "--device", "cpu", "--dtype", "float32", "--quick", *options]
    return CliRunner().invoke(on_gpu.main, given)


@pytest.mark.slow  # a process of its own, and five more for the peaks
def test_one_benchmark_writes_numbers_and_tables(tmp_path: Path) -> None:
    assert run(tmp_path / "out", "--only", "training").exit_code == 0
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"machine.json", "training.json", "training.md"}
    report = json.loads((tmp_path / "out" / "training.json").read_text())
    assert report["settings"]["shape"] == "tiny" and report["settings"]["device"] == "cpu"
    lines = (tmp_path / "out" / "training.md").read_text().splitlines()
    assert lines[0].startswith("| variant | trains | seconds |")
    assert [line.split(" | ")[0] for line in lines[2:7]] == [f"| {variant}" for variant in training_cost.VARIANTS]
    assert json.loads((tmp_path / "out" / "machine.json").read_text())["torch"] == torch.__version__


def test_one_that_fails_or_does_not_end_keeps_none_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def start(words: list[str], **options: Any) -> Any:
        ran.append(words[2])
        if words[2] == "slow":
            raise subprocess.TimeoutExpired(words, options["timeout"])
        return subprocess.CompletedProcess(words, 1 if words[2] == "bad" else 0)

    monkeypatch.setattr(on_gpu.subprocess, "run", start)
    monkeypatch.setattr(on_gpu, "BENCHMARKS", {name: Benchmark(name, (), 1) for name in ("bad", "slow", "good")})
    outcome = run(tmp_path)
    assert outcome.exit_code == 1 and ran == ["bad", "slow", "good"]
    assert "bad: failed, exit code 1" in outcome.output and "slow: ended after 600 seconds" in outcome.output
    monkeypatch.setattr(on_gpu, "BENCHMARKS", {"good": Benchmark("good", (), 1)})
    assert run(tmp_path).exit_code == 0, "the control"


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_takes_what_it_is_given(name: str) -> None:
    """All shapes are known to all of them, from one list."""
    words = on_gpu.command(name, Path("out"), ["--device", "cuda", "--dtype", "bfloat16", "--shape", "1b"])
    assert words[:2] == [sys.executable, "-m"]
    with MAINS[name].make_context(name, words[3:]) as context:
        assert context.params["shape"] == "1b" and context.params["device"] == "cuda"
    (shapes,) = [parameter.type.choices for parameter in MAINS[name].params if parameter.name == "shape"]
    assert list(shapes) == list(make_checkpoint.SHAPES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(on_gpu.main, [str(tmp_path / "out")])
    assert outcome.exit_code == 1 and "torch sees no CUDA device" in outcome.output
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not is_glibc(), reason="this system has another malloc")
def test_peaks_on_the_cpu_are_anonymous_memory() -> None:
    """Also where malloc keeps what is freed, as it does after training."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        peaks = [pool.submit(peak_of_a_block, keeps).result() for keeps in (False, True)]
    # each processor keeps some pages to itself before they count; none is 0, and none counts what was kept again
    assert all(30_000_000 < peak < 90_000_000 for peak in peaks)


def peak_of_a_block(keeps: bool) -> int:
    """Take 60 MB twice, the second time watched; in a process that does nothing else."""
    if keeps:
        assert keep_freed_memory()
    take_blocks()
    device.anonymous_bytes = asked = Mock(wraps=device.anonymous_bytes)
    with peak_of(CPU) as peak:
        take_blocks(asked)
    return peak.bytes


def take_blocks(asked: Mock | None = None) -> None:
    """Take 60 MB, and hold them until somebody has asked how much that is: who asks now may have begun before."""
    held = [torch.ones(500_000) for _ in range(30)]
    until, calls = time.monotonic() + 60, asked.call_count + 2 if asked else 0
    while asked and asked.call_count < calls:
        assert time.monotonic() < until, "nobody asks for the memory"
        time.sleep(0.001)
    held.clear()


def test_tables_become_markdown() -> None:
    table = Table("model", "ms", title="a case")
    table.add_row("base", "1.0")
    assert as_markdown(table) == "**a case**\n\n| model | ms |\n| --- | --: |\n| base | 1.0 |"
    assert as_markdown("all: 1 of 2\n  NOT reached: one") == "* all: 1 of 2\n* NOT reached: one"
