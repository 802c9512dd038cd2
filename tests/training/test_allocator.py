"""Memory that a training step frees is kept for the next one: on glibc, on the CPU, once, and no number changes."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scale_surgery import Request, RunOptions, TrainingSettings, expand, train
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.training import allocator
from scale_surgery.training.allocator import CHOSEN_BY_USER, is_glibc, keep_freed_memory
from tests.conftest import digests
from tests.interrupted_steps import run_apart

CPU = RunOptions(device="cpu")
pytestmark = pytest.mark.skipif(not is_glibc(), reason="this system has another malloc")

# takes a block of 48 MiB again and again, and says how many pages the system had to hand out for it
TAKE_BLOCKS = """
import ctypes, resource, sys
from scale_surgery.training import allocator
allocator.SHARE = 1  # whatever memory this machine has
print(allocator.keep_freed_memory())
libc, size = ctypes.CDLL(None), 48 * 2**20
libc.prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: a page is a page, on every machine
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def take():
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    libc.free(block)
take()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    take()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

SETTINGS = TrainingSettings(steps=4, sequence_length=32, batch_size=2, log_every=1)


def run(code: str, *arguments: object, **environment: str) -> list[str]:
    """Run code in a process of its own; gives the words that it prints."""
    variables = {name: value for name, value in os.environ.items() if name not in CHOSEN_BY_USER} | environment
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout.split()


# what glibc does by default, said by the user: then this program leaves it alone
AS_IT_IS = {"MALLOC_TRIM_THRESHOLD_": str(128 * 1024), "MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}


def train_as_it_is(expanded: Path, text: Path, output: Path) -> None:
    """Train where the user said what glibc does; nothing was set in this fork of a process that never trained."""
    os.environ.update(AS_IT_IS)
    train(expanded, [text], output, SETTINGS, run=CPU)
    assert not keep_freed_memory()


def test_a_block_that_comes_again_costs_no_new_pages() -> None:
    is_kept, pages = run(TAKE_BLOCKS)
    is_kept_by_user, pages_as_it_is = run(TAKE_BLOCKS, **AS_IT_IS)
    assert (is_kept, is_kept_by_user) == ("True", "False")
    taken = 4 * 48 * 2**20 // os.sysconf("SC_PAGE_SIZE")
    assert int(pages) < taken // 4 and taken <= int(pages_as_it_is), "of four blocks not even one"


@pytest.mark.slow
def test_training_sets_it_once_and_no_number_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, where it is kept, and in a process whose user said that it is not."""
    text = tmp_path / "text.jsonl"
    text.write_text("".join(f'{{"text": "Person {n} was born in Rome and lives in Oslo."}}\n' for n in range(40)))
    expanded = expand(SHIPPED_MODEL, Request("2-3", variant="adapt"), tmp_path / "wide").path
    for name in CHOSEN_BY_USER:
        monkeypatch.delenv(name, raising=False)
    keep_freed_memory.cache_clear()
    kept, _ = (train(expanded, [text], tmp_path / name, SETTINGS, run=CPU).path for name in ("kept", "again"))
    assert keep_freed_memory() and keep_freed_memory.cache_info().misses == 1
    done = run_apart(train_as_it_is, expanded, text, tmp_path / "as_it_is")
    assert done.returncode == 0, done.stderr
    assert _shards(kept) == _shards(tmp_path / "as_it_is") != _shards(expanded)
    assert _losses(kept) == _losses(tmp_path / "as_it_is")


def _shards(folder: Path) -> dict[str, str]:
    return {name: digest for name, digest in digests(folder).items() if name.startswith("expansion-")}


def _losses(folder: Path) -> list[Any]:
    entries = map(json.loads, (folder / "training" / "log.jsonl").read_text().splitlines())
    losses = [(entry["step"], entry["loss"]) for entry in entries if "loss" in entry]
    assert len(losses) == 4
    return losses


@pytest.mark.parametrize("answer", (ValueError("unrecognized configuration name"), None, "musl 1.2"))
def test_another_library_is_left_alone(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    def confstr(name: str) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    def refused(name: object) -> None:
        raise AssertionError("the library was asked")

    monkeypatch.setattr(os, "confstr", confstr)
    monkeypatch.setattr(ctypes, "CDLL", refused)
    assert not keep_freed_memory.__wrapped__()


def test_large_blocks_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host of 256 GiB, blocks that are kept would fill a container of 8."""
    limit = tmp_path / "memory.max"
    limit.write_text("max\n")
    monkeypatch.setattr(allocator, "CONTAINER_LIMITS", (str(tmp_path / "none"), str(limit)))
    pages = {"SC_PHYS_PAGES": 8 * 2**30 // 4096, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", lambda name: pages[name])
    assert allocator.largest_kept() == 8 * 2**30 // 64
    pages["SC_PHYS_PAGES"] *= 1000
    assert allocator.largest_kept() == 2**30
    limit.write_text(f"{2**26 * allocator.SHARE}\n")
    assert allocator.largest_kept() == 2**26
