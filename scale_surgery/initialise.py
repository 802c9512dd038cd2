"""Make the values of one planned tensor: read its base tensor, take fused projections apart, apply blocks.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from scale_surgery import blocks
from scale_surgery.checkpoint import Checkpoint, read_tensor
from scale_surgery.families import Family, Linear, get_family
from scale_surgery.plan import Plan, TensorPlan
from scale_surgery.specs import stream_widths

TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def make_tensor(plan: Plan, tensor: TensorPlan, checkpoint: Checkpoint, device: str = "cpu") -> Tensor:
    """Make one new tensor.

    Args:
        plan: The plan that it belongs to.
        tensor: What to make.
        checkpoint: The base model, from which at most one tensor is read.
        device: Where to compute, such as "cpu" or "cuda".

    Returns:
        The tensor on the CPU, in its planned shape and dtype.

    Raises:
        CheckpointError: If the base tensor holds NaN or infinity and is to be decomposed.
    """
    value = _make_float32(plan, tensor, checkpoint, device)
    return value.to(device="cpu", dtype=TORCH_DTYPES[tensor.dtype]).contiguous()


def _make_float32(plan: Plan, tensor: TensorPlan, checkpoint: Checkpoint, device: str) -> Tensor:
    generator = blocks.seeded_generator(plan.request.seed, tensor.name)
    if tensor.init == "zero":
        return torch.zeros(tensor.shape)
    if tensor.init == "random":
        return blocks.random_block(tensor.shape[0], tensor.shape[1], generator)
    weight = read_tensor(checkpoint, tensor.source).to(device)
    if tensor.init == "mean":
        return torch.full(tensor.shape, float(weight.float().mean()))
    blocks.check_finite(weight, tensor.source)
    method = plan.request.svd
    if tensor.block == "up_weight":
        return blocks.svd_embedding(weight, tensor.shape[1], method, generator)
    if tensor.block == "w21":
        return _by_role(plan, tensor, weight, lambda part, up: blocks.svd_w21(part, up, method, generator))
    up_in = tensor.shape[1]
    return _by_role(plan, tensor, weight, lambda part, up: blocks.svd_w22(part, up, up_in, method, generator))


def _by_role(plan: Plan, tensor: TensorPlan, weight: Tensor, make: Callable[[Tensor, int], Tensor]) -> Tensor:
    family = get_family(plan.family)
    linear = _linear_of(family, tensor)
    streams = stream_widths(plan.sizes, plan.widths)
    widths = [streams[stream] for stream in linear.writes()]
    rows = weight.T if family.transposed else weight
    parts = split_roles(rows, linear, [base for base, _ in widths], plan.sizes.head_size)
    made = [make(part, up) for part, (_, up) in zip(parts, widths, strict=True)]
    return join_roles(made, linear, plan.sizes.head_size)


def _linear_of(family: Family, tensor: TensorPlan) -> Linear:
    return next(linear for linear in family.linears if tensor.source.endswith(f".{linear.name}.weight"))


def split_roles(weight: Tensor, linear: Linear, rows: Sequence[int], head_size: int) -> list[Tensor]:
    """Take a fused projection apart: one matrix for each role, rows are outputs."""
    if linear.fused_by == "section" or len(linear.roles) == 1:
        return list(torch.split(weight, list(rows)))
    by_head = weight.view(-1, len(linear.roles), head_size, weight.shape[1])
    return [part.reshape(-1, weight.shape[1]) for part in by_head.unbind(1)]


def join_roles(parts: list[Tensor], linear: Linear, head_size: int) -> Tensor:
    """Put the matrices of fused roles together in the order of rows that the base projection has."""
    if linear.fused_by == "section" or len(parts) == 1:
        return torch.cat(parts)
    by_head = torch.stack([part.view(-1, head_size, part.shape[1]) for part in parts], dim=1)
    return by_head.reshape(-1, parts[0].shape[1])
