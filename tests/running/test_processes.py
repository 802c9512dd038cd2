"""Processes that a launcher started: each computes its share, and all get everything in order."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scale_surgery import PlanError, RunOptions
from scale_surgery.errors import Problem
from scale_surgery.running.processes import join_processes, shared_out
from tests.conftest import problems

SCRIPT = """
import json, sys
from scale_surgery.running.options import RunOptions
from scale_surgery.running.processes import join_processes, shared_out

processes, run = join_processes(RunOptions(device="cpu"))
found = []
for items in ([], [7], [3, 1, 4, 1, 5], [2, 7, 1, 8]):
    calls = []
    values = shared_out(items, lambda item: calls.append(item) or item * item, processes)
    found.append([values, calls])
with open(f"{sys.argv[1]}/{processes.process_index}.json", "w") as file:
    json.dump([run.device, found], file)
"""


def test_one_process_computes_all():
    processes, run = join_processes(RunOptions())
    assert processes is None and run == RunOptions()
    assert shared_out([3, 1, 4], lambda item: item * item) == [9, 1, 16] and shared_out([], len) == []


@pytest.mark.slow
def test_two_processes_compute_a_half_each_and_get_all(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run([*words, str(tmp_path / "script.py"), str(tmp_path)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    calls = (([], [7], [3, 4, 5], [2, 1]), ([], [7], [1, 1, 3], [7, 8]))
    for rank, expected_calls in enumerate(calls):
        device, rounds = json.loads((tmp_path / f"{rank}.json").read_text())
        assert device == "cpu" and [values for values, _ in rounds] == [[], [49], [9, 1, 16, 1, 25], [4, 49, 1, 64]]
        assert tuple(made for _, made in rounds) == expected_calls


def test_a_model_is_not_sharded_to_be_measured(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert problems(join_processes, RunOptions(), error=PlanError) == [Problem("launcher-with-fsdp", processes=2)]
