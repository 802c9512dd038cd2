"""Processes that are killed at their work or run out of disk, for several test files.

Each is a fork of one process that has imported torch once, so that it begins within milliseconds.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.figure  # noqa: F401  (not again in each fork, like what follows)
import safetensors.torch  # noqa: F401
import torch

from scale_surgery.checkpoint import staging
from scale_surgery.cli.program import main as command_line
from scale_surgery.errors import CheckpointError
from scale_surgery.planning.request import Request
from scale_surgery.surgery.expand import expand
from scale_surgery.surgery.strip import strip
from scale_surgery.training import trainer  # noqa: F401
from scale_surgery.training.run_folder import TrainingRun
from scale_surgery.training.settings import EvalData, TrainingSettings
from scale_surgery.training.train import train

# several shards, so that an interruption can fall between two
SHARD_BYTES = 40_000
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])


def die(*ignored: Any, **also_ignored: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def expand_or_strip_killed(label: str, count: int, request: Request | None, source: Path, target: Path) -> None:
    """Expand, or strip without a request; dies when `label` has advanced `count` times, or before it is renamed."""
    sys.modules["scale_surgery.planning.plan"].SHARD_BYTES = SHARD_BYTES

    @contextlib.contextmanager
    def track(name: str, total: int) -> Iterator[Callable[[int], None]]:
        left = [count]

        def advance(done: int) -> None:
            left[0] -= 1
            if name == label and left[0] < 0:
                die()

        yield advance

    if label == "rename":
        staging._rename = die
    if request is None:
        strip(source, target, track=track, overwrite=True)
    else:
        expand(source, request, target, track=track, overwrite=True)


def expand_on_a_full_disk(limit: int, request: Request, source: Path, target: Path) -> None:
    """Expand where no file can be larger than the limit."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit,) * 2)
    try:
        expand(source, request, target)
    except CheckpointError as error:
        sys.exit(str(error))


def train_and_die_at_the_end(model: Path, text: Path, output: Path, settings: TrainingSettings, old: Path) -> None:
    """Train, and die between the last checkpoint and the end of the run."""
    TrainingRun.finish = lambda self, log: os._exit(9)
    train(model, [text], output, settings, eval_data=EvalData(old=[old]))


def run_command(words: list[str]) -> None:
    """What `scale-surgery WORDS` does."""
    command_line(words)


def work_with_errors_in(file: str, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    gc.freeze()  # the collector passes over what was imported, and does not copy it
    sys.stderr = Path(file).open("w", encoding="utf-8")  # noqa: SIM115  (the message of an exit comes last)
    torch.set_num_threads(1)
    work(*arguments)


def run_apart(work: Callable[..., None], *arguments: Any) -> SimpleNamespace:
    """Run a function of this module in a process of its own; gives its exit code and what it wrote as errors."""
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as errors:
        process = FORKS.Process(target=work_with_errors_in, args=(errors.name, work, arguments))
        process.start()
        process.join()
        return SimpleNamespace(returncode=process.exitcode, stderr=errors.read())


def run_killed(label: str, count: int, request: Request | None, source: Path, target: Path) -> SimpleNamespace:
    """Expand, or strip without a request, in a process that kills itself; see `expand_or_strip_killed`."""
    return run_apart(expand_or_strip_killed, label, count, request, source, target)
