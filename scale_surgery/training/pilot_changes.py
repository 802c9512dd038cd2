"""What a pilot changed: the linears that trained, against their values on disk."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from scale_surgery.checkpoint.folder import Checkpoint, read_tensor
from scale_surgery.errors import TrainingError
from scale_surgery.planning.architecture import Block, Linear, Role
from scale_surgery.planning.base import Base
from scale_surgery.planning.stored import module_path
from scale_surgery.progress import Progress
from scale_surgery.surgery.initialise import split_roles
from scale_surgery.training.update_scores import Update, measure_update


@dataclass(frozen=True)
class Matrix:
    """A linear that trained: its layer, its facts, its module, and the name of its weight on disk."""

    layer: int
    block: Block
    linear: Linear
    module: nn.Module
    stored_name: str


def find_matrices(model: Any, base: Base, groups: tuple[str, ...]) -> list[Matrix]:
    """The linears of all layers that belong to the given groups, "attn" or "ffn"."""
    facts = base.architecture
    layers = enumerate(model.get_submodule(facts.layers_path))
    found = []
    for number, layer in layers:
        for block in (block for block in facts.kind(number).blocks if block.group in groups):
            for linear in block.linears:
                own = layer.get_submodule(linear.name)
                stored = f"{module_path(facts, base.prefix, number, linear.name)}.weight"
                found.append(Matrix(number, block, linear, own, stored))
    return found


@torch.no_grad()
def relative_changes(matrices: list[Matrix], checkpoint: Checkpoint) -> dict[int, float]:
    """Relative norm of the change of each layer until now, |W' - W| / |W| of all its matrices as one.

    Args:
        matrices: What trains.
        checkpoint: The files with the values at the start.
    """
    squares: dict[int, tuple[float, float]] = {}
    for matrix in matrices:
        after: Any = matrix.module.weight
        before = read_tensor(checkpoint, matrix.stored_name).to(after.device, after.dtype)
        changed, whole = squares.get(matrix.layer, (0.0, 0.0))
        squares[matrix.layer] = (
            changed + float((after - before).norm()) ** 2,
            whole + float(before.norm()) ** 2,
        )
    return {
        layer: math.sqrt(changed / whole) if whole else (math.inf if changed else 0.0)
        for layer, (changed, whole) in squares.items()
    }


@torch.no_grad()
def measure_updates(matrices: list[Matrix], base: Base, advance: Progress) -> dict[int, dict[Role, Update]]:
    """Compare each matrix with its values on disk, role by role where a projection is fused.

    Args:
        matrices: What trained.
        base: The base model, in whose files are the values at the start.
        advance: Called after each matrix.

    Returns:
        The changes, by layer and role.

    Raises:
        TrainingError: If a matrix holds numbers that are not finite.
    """
    updates: dict[int, dict[Role, Update]] = {}
    for matrix in matrices:
        after: Any = matrix.module.weight
        if not after.isfinite().all():
            raise TrainingError(
                f"{matrix.stored_name}: holds numbers that are not finite after the pilot. Lower --learning-rate."
            )
        if after.device.type != "cuda":
            after = after.cpu()  # float64 is not there on every device
        before = read_tensor(base.checkpoint, matrix.stored_name).to(after.device)
        pairs = (
            split_roles(weight.T if base.architecture.transposed else weight, matrix.linear, matrix.block.head_size)
            for weight in (before, after)
        )
        own = updates.setdefault(matrix.layer, {})
        for role, old, new in zip(matrix.linear.roles, *pairs, strict=True):
            own[role] = measure_update(old, new)
        advance(1)
    return updates
