"""Processes of a launcher, such as `accelerate launch`: their number, and their joint results."""

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
# one process may read or write while the others wait
LONGEST_WAIT = timedelta(days=7)


def count_launched() -> int:
    """Return the number of processes that a launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def join_processes(run: RunOptions) -> tuple[PartialState | None, RunOptions]:
    """Return the processes of a launcher, and the options with this process's device.

    The processes are None if there is only one.
    """
    if (count := count_launched()) == 1:
        return None, run
    from accelerate import PartialState
    from accelerate.utils import parse_flag_from_env

    # each process loads a whole model
    if parse_flag_from_env("ACCELERATE_USE_FSDP"):
        raise PlanError(Problem("launcher-with-fsdp", processes=count))
    is_cpu = choose_device(run.device) == "cpu"
    processes = PartialState(cpu=is_cpu, timeout=LONGEST_WAIT)
    # gloo's threads must end before the interpreter does
    atexit.register(processes.destroy_process_group)
    return processes, replace(run, device="cpu" if is_cpu else str(processes.device))


def shared_out(
    items: Sequence[Item], compute: Callable[[Item], Value], processes: PartialState | None = None
) -> list[Value]:
    """Compute a value for each item, shared out over processes. All processes get all values, in item order."""
    if processes is None or processes.num_processes == 1 or not items:
        return list(map(compute, items))
    from accelerate.utils import gather_object

    # all processes make the same number of calls, which sharded models need
    rounds, count = math.ceil(len(items) / processes.num_processes), processes.num_processes
    values = [compute(items[(turn * count + processes.process_index) % len(items)]) for turn in range(rounds)]
    # values of the first process, then of the second, ...
    every = gather_object(values)
    return [every[index % count * rounds + index // count] for index in range(len(items))]
