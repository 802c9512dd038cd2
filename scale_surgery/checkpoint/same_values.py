"""Comparison of the values of two tensors: as numbers of any dtype, or byte for byte as stored."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

from scale_surgery.checkpoint.folder import Checkpoint, read_chunks
from scale_surgery.errors import Problem

if TYPE_CHECKING:
    from torch import Tensor


def are_same_bytes(checkpoint: Checkpoint, name: str, other: str) -> bool:
    """Return True if two tensors of a checkpoint have the same bytes. Only a few MB are in memory at a time."""
    infos = checkpoint.tensors[name], checkpoint.tensors[other]
    if len({(info.dtype, info.shape) for info in infos}) > 1:
        return False
    chunks = (read_chunks(checkpoint.path / info.file, info.offset, info.bytes) for info in infos)
    return all(one == two for one, two in zip_longest(*chunks))


def difference(name: str, tensor: Tensor, wanted: Tensor) -> Problem | None:
    """Return the problem of a tensor with other values than another of its shape, or None if all bits are equal."""
    import torch

    # widened to the narrowest dtype that represents both exactly, so the comparison does not round
    dtype = torch.promote_types(tensor.dtype, wanted.dtype)
    if _are_same_bits(tensor.to(dtype), wanted.to(dtype)):
        return None
    if _are_same_bits(wanted.to(tensor.dtype), tensor):
        return Problem("tensor-rounded", name, dtype=f"{tensor.dtype}".removeprefix("torch."))
    changes = (tensor.to(torch.float64) - wanted.to(torch.float64)).abs()
    count = max(1, int((changes != 0).sum()))
    return Problem("tensor-values-differ", name, count=count, total=changes.numel(), most=changes.max().item())


def _are_same_bits(a: Tensor, b: Tensor) -> bool:
    """Return True if tensors of one dtype have the same bits: zeros have signs, and NaN does not equal itself."""
    import torch

    return torch.equal(*(tensor.contiguous().flatten().view(torch.uint8) for tensor in (a, b)))
