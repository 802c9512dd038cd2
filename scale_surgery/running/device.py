"""Devices: the meaning of "auto" on this machine."""

from __future__ import annotations

import platform
import sys
from typing import Any

from scale_surgery.errors import PlanError, Problem

# devices that support every operation: float64 for exact comparisons, eigenvalues, all attention kernels
COMPLETE_KINDS = ("cuda",)
# kinds of accelerators
ACCELERATORS = ("cuda", "mps", "xpu", "npu", "hpu", "mtia")
# names of 64-bit ARM processors
ARM = ("aarch64", "arm64")


def choose_device(name: str, *, only_trains: bool = False) -> str:
    """Resolve --device: "auto" is the accelerator if it supports every needed operation, else the CPU."""
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        if accelerator is None or not (only_trains or accelerator.type in COMPLETE_KINDS):
            return "cpu"
        return accelerator.type
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise PlanError(Problem("device-unknown", "--device", device=name)) from error
    if device.type in ACCELERATORS and accelerator is None:
        raise PlanError(Problem("device-without-accelerator", "--device", device=name))
    if device.type in ACCELERATORS and accelerator is not None and accelerator.type != device.type:
        raise PlanError(Problem("device-of-other-kind", "--device", device=name, kind=accelerator.type))
    return str(device)


def has_bfloat16(device: str) -> bool:
    """Return True if a device multiplies in bfloat16. A CPU without such instructions takes several times as long.

    All accelerators are assumed to support it.
    """
    import torch

    if torch.device(device).type != "cpu":
        return True
    if platform.machine().lower() in ARM:
        # oneDNN queries the processor; torch without oneDNN has no kernels for these instructions
        return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    # on x86 oneDNN accepts bfloat16 from AVX-512 on, but plain AVX-512 widens it to float32
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error means that the machine or a device ran out of memory."""
    # if torch is not imported, the error is not from torch
    torch: Any = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    # torch's allocator on the CPU raises no class of its own
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in f"{error}"
