"""In which precision benchmarks/language multiplies matrices."""

from __future__ import annotations

import torch


def mixed(device: str) -> torch.autocast:
    """Multiply in bfloat16 where a device does that fast, as `torch.autocast` does; else in the type of the weights."""
    return torch.autocast(device, torch.bfloat16, enabled=is_bfloat16_fast(device))


def is_bfloat16_fast(device: str) -> bool:
    """Whether bfloat16 pays; processors without AVX-512 take thirty times as long for it as for float32."""
    return device != "cpu" or torch.backends.cpu.get_cpu_capability().startswith("AVX512")
