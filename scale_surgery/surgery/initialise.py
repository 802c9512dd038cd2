"""Make the values of one planned tensor: read its base tensor, take fused projections apart, apply blocks.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from scale_surgery.checkpoint.expansions import nameless
from scale_surgery.checkpoint.folder import Checkpoint, read_tensor
from scale_surgery.planning.architecture import Block, Linear
from scale_surgery.planning.plan import Plan
from scale_surgery.planning.specs import linear_widths
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
    if plan.numbering is not None or tensor.block in ("weight", "bias", "bias11"):
        return value
    new = tensor.elements // value.numel()
    is_transposed = plan.architecture.transposed and value.dim() == 2
    rows = value.T if is_transposed else value
    if tensor.block == "w11":
        return rows
    if tensor.block == "w12":
        generator = _generator(plan, tensor)
        return blocks.copied_w12(rows, new, generator, TORCH_DTYPES[tensor.dtype])
    _, linear = _linear_of(plan, tensor)
    parts = torch.split(rows, list(linear.outputs))
    return torch.cat([part for part in parts for _ in range(new)])


def _generator(plan: Plan, tensor: TensorPlan) -> torch.Generator:
    """Where the randomness of a tensor comes from: what its expansion is called changes no value."""
    return blocks.seeded_generator(plan.request.seed, nameless(tensor.name))


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
    generator = _generator(plan, tensor)
    if tensor.init == "zero":
        return torch.zeros(tensor.shape)
    if tensor.init == "one":
        return torch.ones(tensor.shape)
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
    block, linear = _linear_of(plan, tensor)
    rows = weight.T if plan.architecture.transposed else weight
    parts = split_roles(rows, linear, block.head_size)
    ups = [up for _, up in linear_widths(block, linear, plan.widths).outputs]
    made = [make(part, up) for part, up in zip(parts, ups, strict=True)]
    return join_roles(made, linear, block.head_size)


def _linear_of(plan: Plan, tensor: TensorPlan) -> tuple[Block, Linear]:
    found = plan.architecture.find_linear(tensor.source.rpartition(".")[0])
    assert found is not None, tensor.source
    return found


def split_roles(weight: Tensor, linear: Linear, head_size: int, rows: Sequence[int] | None = None) -> list[Tensor]:
    """Take a fused projection apart: one matrix for each role, rows are outputs; as many as the base's or `rows`."""
    widths = list(rows or linear.outputs)
    if linear.fused_by == "section" or len(linear.roles) == 1:
        return list(torch.split(weight, widths))
    groups = _groups(widths, head_size)
    by_group = weight.view(groups, -1, weight.shape[1])
    parts = torch.split(by_group, [width // groups for width in widths], dim=1)
    return [part.reshape(-1, weight.shape[1]) for part in parts]


def join_roles(parts: list[Tensor], linear: Linear, head_size: int) -> Tensor:
    """Put the matrices of fused roles together in the order of rows that the base projection has."""
    if linear.fused_by == "section" or len(parts) == 1:
        return torch.cat(parts)
    groups = _groups([len(part) for part in parts], head_size)
    by_group = torch.cat([part.view(groups, -1, part.shape[1]) for part in parts], dim=1)
    return by_group.reshape(-1, parts[0].shape[1])


def _groups(widths: Sequence[int], head_size: int) -> int:
    """Groups of rows head by head: a key, a value, and the queries that share them; so many as the fewest heads."""
    return min(widths) // head_size
