"""Processes that are killed at their work or run out of disk, for several test files.

Each is a fork of one process that has imported torch once, so that it begins within milliseconds.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.figure  # noqa: F401  (not again in each fork, like what follows)
import safetensors.torch  # noqa: F401
import torch

from scale_surgery.checkpoint import staging
from scale_surgery.cli import adopt, apply, compose, merge, plan, route_export  # noqa: F401
from scale_surgery.cli.program import main as command_line
from scale_surgery.deriving import planned
from scale_surgery.errors import CheckpointError, TrainingError
from scale_surgery.modeling.expanded_routers import PosteriorRouter
from scale_surgery.planning.request import Request
from scale_surgery.running import drift  # noqa: F401
from scale_surgery.show import console  # noqa: F401
from scale_surgery.surgery.expand import expand
from scale_surgery.surgery.route import set_routing
from scale_surgery.surgery.strip import strip
from scale_surgery.training import trainer  # noqa: F401
from scale_surgery.training.run_folder import TrainingRun
from scale_surgery.training.settings import EvalData, TrainingSettings, TrainingStart
from scale_surgery.training.train import train

# several shards, so that an interruption can fall between two
SHARD_BYTES = 40_000
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__, "tests.interrupted_warm"])


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
    """Expand where no file can be larger than the limit; what is planned before writes files of its own, elsewhere."""
    made = planned.plan(source, request)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit,) * 2)
    try:
        expand(source, made, target)
    except CheckpointError as error:
        sys.exit(str(error))


def train_and_die_at_the_end(model: Path, text: Path, output: Path, settings: TrainingSettings, old: Path) -> None:
    """Train, and die between the last checkpoint and the end of the run."""
    TrainingRun.finish = lambda self, log: os._exit(9)
    train(model, [text], output, settings, eval_data=EvalData(old=[old]))


def train_on_a_full_disk(limit: int, model: Path, text: Path, output: Path, settings: TrainingSettings) -> None:
    """Train where no file can be larger than the limit."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit,) * 2)
    try:
        train(model, [text], output, settings, start=TrainingStart(base_weights="link"))
    except TrainingError as error:
        sys.exit(str(error))


def run_command(words: list[str]) -> None:
    """What `scale-surgery WORDS` does."""
    command_line(words)


def run_as_one_of(rank: int, count: int, port: int, words: list[str]) -> None:
    """Do what `scale-surgery WORDS` does in one of the processes that a launcher starts."""
    torch.set_num_threads(1)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    os.environ.update({name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"})
    command_line(words)


@dataclass(frozen=True)
class Disturbance:
    """What befalls a process.

    Attributes:
        kind: "none", "kill" at a file call, "alarm" after some processor time, "error" at a call that writes, or
            "full", where no file can be larger than a size.
        at: Which call, which millisecond or which size, from 0.
        number: The error of the system.
    """

    kind: str = "none"
    at: int = 0
    number: int = errno.ENOSPC


@dataclass
class FileCalls:
    """Counts calls that name a file of a folder, as Python's audit hooks tell them, and disturbs one of them."""

    place: str
    disturbance: Disturbance
    calls: int = 0
    writes: int = 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not (event == "open" or event.startswith("os.") or event == "fcntl.ioctl"):
            return
        if not any(
            str(argument).startswith(self.place) for argument in arguments if isinstance(argument, str | os.PathLike)
        ):
            return
        kind, at = self.disturbance.kind, self.disturbance.at
        if kind == "kill" and self.calls == at:
            die()
        self.calls += 1
        if event in ("os.scandir", "os.listdir", "os.walk") or (event == "open" and not is_written(arguments[2])):
            return
        self.writes += 1
        if kind == "error" and self.writes == at + 1:
            number = self.disturbance.number
            raise OSError(number, os.strerror(number), str(arguments[0]))


def is_written(flags: int) -> bool:
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def run_disturbed(words: list[str], place: str, disturbance: Disturbance, record: str) -> None:
    """Run a command on the files of a place, disturb it, and record how many calls it made in how much time."""
    sys.modules["scale_surgery.planning.plan"].SHARD_BYTES = SHARD_BYTES
    os.fsync = lambda handle: None
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123
    calls, begun = FileCalls(place, disturbance), time.process_time()
    sys.addaudithook(calls)
    if disturbance.kind == "alarm":
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, (disturbance.at + 1) / 1000)
    if disturbance.kind == "full":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (disturbance.at,) * 2)
    try:
        if words[0] == "set-routing":
            set_routing(words[1], PosteriorRouter(prior=0.25))
        else:
            run_command(words)
    except CheckpointError as error:
        sys.exit(str(error))
    finally:
        if disturbance.kind == "none":
            spent = int((time.process_time() - begun) * 1000)
            Path(record).write_text(json.dumps({"calls": calls.calls, "writes": calls.writes, "milliseconds": spent}))


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
