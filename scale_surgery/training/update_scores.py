"""What training did to a matrix, as two numbers: how much it changed, and in how many directions.

    relative norm    |W' - W| / |W|,   |.| the Frobenius norm
    effective rank   of W' - W, see `spectra`

Several matrices are scored as one, with them as blocks on its diagonal and zeros elsewhere: squares of norms add up,
and singular values are put together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scale_surgery.evidence import spectra


@dataclass(frozen=True)
class Update:
    """What a score needs to know of the change of one matrix.

    Attributes:
        norm: Frobenius norm of the matrix before.
        size: How many numbers it has.
        values: Singular values of the difference, float64, on the CPU, (min(rows, columns),).
    """

    norm: float
    size: int
    values: Tensor


def measure_update(before: Tensor, after: Tensor) -> Update:
    """Compare a matrix before and after training, in float64.

    Args:
        before: The matrix as it was, any dtype, shape (d_out, d_in).
        after: The matrix as it is, float32 or better, same shape and device.

    Returns:
        Its norm and size, and the singular values of the difference.
    """
    return Update(spectra.norm_of(before), before.numel(), spectra.singular_values(after - before.to(after.dtype)))


def relative_norm(updates: Sequence[Update]) -> float:
    """Norm of what changed over norm of what was, of all matrices as one.

        sqrt(sum_m |W'_m - W_m|^2) / sqrt(sum_m |W_m|^2)

    Args:
        updates: Changes of one matrix or of several.

    Returns:
        The score; infinity where matrices of zeros changed, and 0 where nothing changed.
    """
    changed = math.sqrt(sum(float(update.values.square().sum()) for update in updates))
    whole = math.sqrt(sum(update.norm**2 for update in updates))
    if whole == 0:
        return math.inf if changed else 0.0
    return changed / whole


def equal_steps(updates: Sequence[Update]) -> float:
    """What `relative_norm` would be if every number had moved by one, whatever was learned.

        sqrt(sum_m n_m) / sqrt(sum_m |W_m|^2),   n_m the size of a matrix

    Args:
        updates: Changes of one matrix or of several.

    Returns:
        The score; infinity where all matrices are zeros.
    """
    whole = math.sqrt(sum(update.norm**2 for update in updates))
    return math.sqrt(sum(update.size for update in updates)) / whole if whole else math.inf


def effective_rank(updates: Sequence[Update]) -> float:
    """Effective rank of what changed, of all matrices as one.

        exp(- sum_i p_i ln p_i),   p_i = s_i / sum_j s_j   (Roy and Vetterli 2007)

    Args:
        updates: Changes of one matrix or of several.

    Returns:
        From 1, one direction, to the number of singular values, all alike; 0 where nothing changed.
    """
    return spectra.effective_rank(torch.cat([update.values for update in updates])) or 0.0
