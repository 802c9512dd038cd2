"""Make the values of one planned tensor: read its base tensor, take fused projections apart, apply blocks.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from scale_surgery.checkpoint.folder import Checkpoint, read_tensor
from scale_surgery.planning.families import Family, Linear
from scale_surgery.planning.plan import Plan
from scale_surgery.planning.specs import stream_widths
from scale_surgery.planning.tensors import TensorPlan
from scale_surgery.progress import Progress, no_progress
from scale_surgery.surgery import blocks

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
    make = _copy if tensor.init == "copy" else _make_float32
    value = make(plan, tensor, checkpoint, device)
    return value.to(device="cpu", dtype=TORCH_DTYPES[tensor.dtype]).contiguous()


def _copy(plan: Plan, tensor: TensorPlan, checkpoint: Checkpoint, device: str) -> Tensor:
    """Copy a base tensor as its block wants it: W21 once for each new copy, W12 a share of W for each."""
    value = read_tensor(checkpoint, tensor.source)
    if tensor.block in ("weight", "bias", "bias11"):
        return value
    family, new = plan.architecture, tensor.elements // value.numel()
    is_transposed = family.transposed and value.dim() == 2
    rows = value.T if is_transposed else value
    if tensor.block == "w11":
        return rows
    if tensor.block == "w12":
        generator = blocks.seeded_generator(plan.request.seed, tensor.name)
        return blocks.copied_w12(rows, new, generator, TORCH_DTYPES[tensor.dtype])
    streams = stream_widths(plan.sizes, plan.widths)
    linear = _linear_of(family, tensor)
    parts = torch.split(rows, [streams[stream][0] for stream in linear.writes()])
    return torch.cat([part for part in parts for _ in range(new)])


def altered_copies(
    plan: Plan, copies: Sequence[TensorPlan], checkpoint: Checkpoint, advance: Progress = no_progress
) -> list[str]:
    """Copies of base tensors in an expanded checkpoint that are none any more, a line each.

    Args:
        plan: Its plan.
        copies: Tensors of it that began as copies.
        checkpoint: The expanded checkpoint, with the base tensors.
        advance: Called with the bytes of each copy.

    Returns:
        The lines; tensors that are missing or of a wrong shape are left to other checks.
    """
    lines = []
    for tensor in copies:
        advance(tensor.bytes)
        info = checkpoint.tensors.get(tensor.name)
        source = checkpoint.tensors.get(tensor.source)
        if info is None or info.shape != tensor.shape or source is None:
            continue
        found, made = read_tensor(checkpoint, tensor.name), make_tensor(plan, tensor, checkpoint)
        # on another processor the noise of several copies may be rounded another way
        is_near = tensor.elements > source.elements and torch.allclose(found.float(), made.float(), 1e-2, 1e-6)
        if not (is_near or torch.equal(found, made)):
            lines.append(f"{tensor.name}: is not the copy of {tensor.source} that it began as.")
    return lines


def _make_float32(plan: Plan, tensor: TensorPlan, checkpoint: Checkpoint, device: str) -> Tensor:
    generator = blocks.seeded_generator(plan.request.seed, tensor.name)
    if tensor.init == "zero":
        return torch.zeros(tensor.shape)
    if tensor.init == "mute":
        return torch.full(tensor.shape, float(plan.architecture.mute_gain))
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
    family = plan.architecture
    linear = _linear_of(family, tensor)
    streams = stream_widths(plan.sizes, plan.widths)
    widths = [streams[stream] for stream in linear.writes()]
    rows = weight.T if family.transposed else weight
    parts = split_roles(rows, linear, [base for base, _ in widths], plan.sizes.head_size)
    made = [make(part, up) for part, (_, up) in zip(parts, widths, strict=True)]
    return join_roles(made, linear, plan.sizes.head_size)


def _linear_of(family: Family, tensor: TensorPlan) -> Linear:
    return next(linear for linear in family.linears if tensor.source.rpartition(".")[0].endswith(f".{linear.name}"))


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
