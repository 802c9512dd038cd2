"""Processes that a launcher started, such as `accelerate launch`: which this is, and what all of them computed."""

from __future__ import annotations

import atexit
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from scale_surgery.errors import PlanError, Problem
from scale_surgery.running.device import choose_device
from scale_surgery.running.options import RunOptions

if TYPE_CHECKING:
    from accelerate import PartialState

Item = TypeVar("Item")
Value = TypeVar("Value")
# one reads or writes what the others wait for
LONGEST_WAIT = timedelta(hours=6)


def count_launched() -> int:
    """How many processes a launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def join_processes(run: RunOptions) -> tuple[PartialState | None, RunOptions]:
    """The processes that a launcher started, and where models run in this one; None for one process."""
    if (count := count_launched()) == 1:
        return None, run
    from accelerate import PartialState
    from accelerate.utils import parse_flag_from_env

    # each process holds a whole model
    if parse_flag_from_env("ACCELERATE_USE_FSDP"):
        raise PlanError(Problem("launcher-with-fsdp", processes=count))
    is_cpu = choose_device(run.device) == "cpu"
    processes = PartialState(cpu=is_cpu, timeout=LONGEST_WAIT)
    # gloo's threads must have ended before the interpreter does
    atexit.register(processes.destroy_process_group)
    return processes, replace(run, device="cpu" if is_cpu else str(processes.device))


def shared_out(
    items: Sequence[Item], compute: Callable[[Item], Value], processes: PartialState | None = None
) -> list[Value]:
    """Compute something of each item, every process of its share; all get all values, in the order of the items."""
    if processes is None or processes.num_processes == 1 or not items:
        return list(map(compute, items))
    from accelerate.utils import gather_object

    # all make the same number of calls, as a model that is sharded over them needs
    rounds, count = math.ceil(len(items) / processes.num_processes), processes.num_processes
    values = [compute(items[(turn * count + processes.process_index) % len(items)]) for turn in range(rounds)]
    # those of the first process, then those of the second, ...
    every = gather_object(values)
    return [every[index % count * rounds + index // count] for index in range(len(items))]
