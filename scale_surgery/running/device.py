"""Where work runs: what "auto" stands for on this machine."""

from __future__ import annotations

import sys
from typing import Any

from scale_surgery.errors import PlanError

# every operation is there: float64 for exact comparisons, eigenvalues, all attention kernels
COMPLETE_KINDS = ("cuda",)
# on the CPU a model larger than the given memory is read from its files as it runs
MORE_MEMORY = "Memory ran out: give --device cpu, or a smaller --batch-size or --memory, where a command has them."


def choose_device(name: str, *, only_trains: bool = False) -> str:
    """Name the device that an option stands for; it is not tried.

    Args:
        name: What was asked for: "auto", or a device as torch writes it.
        only_trains: Take any accelerator for "auto"; otherwise one that has every operation of inference and of
            decompositions, which Apple's GPUs have not.

    Returns:
        A device as torch writes it; for "auto" an accelerator if there is one, else "cpu".

    Raises:
        PlanError: If torch knows no such device.
    """
    import torch

    if name == "auto":
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found.type if found is not None and (only_trains or found.type in COMPLETE_KINDS) else "cpu"
    try:
        return str(torch.device(name))
    except RuntimeError as error:
        raise PlanError(f"--device is {name!r}, expected auto, cpu, cuda or another that torch knows.") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, of the machine or of a device."""
    # who has not imported torch has not had its errors either
    torch: Any = sys.modules.get("torch")
    return isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError))
