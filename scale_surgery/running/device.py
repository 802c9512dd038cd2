"""Devices: which one "auto" is on this machine."""

from __future__ import annotations

import platform
import sys
from typing import Any

from scale_surgery.errors import PlanError, Problem

# devices with every operation: float64 for exact comparisons, eigenvalues, all attention kernels
COMPLETE_KINDS = ("cuda",)
# kinds of accelerators
ACCELERATORS = ("cuda", "mps", "xpu", "npu", "hpu", "mtia")
# names of 64-bit ARM processors
ARM = ("aarch64", "arm64")


def choose_device(name: str, *, only_trains: bool = False) -> str:
    """Resolve --device: "auto" is the accelerator if it has every operation that is needed, else the CPU."""
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
    """Whether a device has instructions that multiply in bfloat16; a CPU without them takes several times as long.

    Of accelerators it is taken for granted.
    """
    import torch

    if torch.device(device).type != "cpu":
        return True
    if platform.machine().lower() in ARM:
        # oneDNN asks the processor; a torch without it has no kernels that use them
        return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    # on x86 oneDNN takes bfloat16 from AVX-512 on, and widens it to float32 where there is no more than that
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, of the machine or of a device."""
    # without an import of torch the error cannot be torch's
    torch: Any = sys.modules.get("torch")
    return isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError))
