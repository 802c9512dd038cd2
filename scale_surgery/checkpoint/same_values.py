"""Whether two tensors hold the same numbers, whatever dtypes they are stored in."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def difference(tensor: Tensor, wanted: Tensor) -> str | None:
    """How the numbers of two tensors of one shape differ; None where all bits are the same."""
    import torch

    # widened to the narrowest dtype that holds either exactly, so that nothing is rounded before it is compared
    dtype = torch.promote_types(tensor.dtype, wanted.dtype)
    if _are_same_bits(tensor.to(dtype), wanted.to(dtype)):
        return None
    if _are_same_bits(wanted.to(tensor.dtype), tensor):
        return f"was rounded to {str(tensor.dtype).removeprefix('torch.')}."
    changes = (tensor.to(torch.float64) - wanted.to(torch.float64)).abs()
    count = max(1, int((changes != 0).sum()))
    return f"{count:,} of {changes.numel():,} values differ, by up to {changes.max().item():.3g}."


def _are_same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether tensors of one dtype have the same bits: zeros have signs, and NaN is not equal to itself."""
    import torch

    return torch.equal(*(tensor.contiguous().flatten().view(torch.uint8) for tensor in (a, b)))
