"""The size of a matrix, and the number of directions that it uses.

    norm            ||A||_F, the root of the sum of squares
    effective rank  exp(H(p)), p_i = s_i / sum_j s_j, H(p) = -sum_i p_i ln p_i, s = singular values of A
                    (Roy and Vetterli 2007, "The effective rank: a measure of effective dimensionality")

An effective rank is between 1, for one direction, and the number of rows or columns, for equal directions.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# numbers converted to float64 at a time, 64 MiB
CHUNK_ELEMENTS = 1 << 23


def norm_of(tensor: Tensor) -> float:
    """Compute the Frobenius norm ||A||_F, added up in float64."""
    import torch

    chunks = torch.split(tensor.detach().reshape(-1), CHUNK_ELEMENTS)
    return math.sqrt(sum(float(chunk.double().square().sum()) for chunk in chunks))


def singular_values(matrix: Tensor) -> Tensor:
    """Compute all singular values, as roots of the eigenvalues of the smaller of A^T A and A A^T."""
    import torch

    from scale_surgery.tensors.blocks import gram

    # squaring costs precision: a value below 1e-8 of the largest one is rounding noise, too small to change the
    # effective rank
    squares: Tensor = torch.linalg.eigvalsh(gram(matrix, "exact"))
    return squares.clamp_min(0).sqrt().flip(0).cpu()


def effective_rank(values: Tensor) -> float | None:
    """Compute exp(H(p)) of singular values, with p_i = s_i / sum_j s_j (Roy and Vetterli 2007)."""
    import torch

    total = float(values.sum())
    if total == 0:
        return None
    shares = values.double() / total
    return math.exp(float(torch.special.entr(shares).sum()))
