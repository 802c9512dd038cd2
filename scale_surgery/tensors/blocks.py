"""The linear algebra of an expansion: how new tensors get their values from base tensors.

    [ y    ]   [ W    W12 ] [ x    ]      W12 = 0     the up stream does not write into the base stream
    [ y_up ] = [ W21  W22 ] [ x_up ]      W21 = U_r^T W = S_r V_r^T,   W = U S V^T,   r = added outputs

SCALE (arXiv 2511.03270, section 3.2) names SVD for W21 and zero for W22 as the best pair, and gives no
formula; the one above is ours (docs/concepts.md). It needs only the leading eigenvectors of the smaller of
W^T W and W W^T, never a full SVD. Everything is computed in float32 or better and cast once, at the end.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from scale_surgery.errors import CheckpointError, Problem

SvdMethod = Literal["exact", "fast"]
# small enough that the allocator gives the same memory again, and no page is cleared twice
CHUNK_ELEMENTS = 1 << 22
# columns of a Gram matrix that are computed together; what lies below their diagonal is copied
GRAM_COLUMNS = 256
# extra directions and passes of the randomized range finder (Halko, Martinsson and Tropp 2011)
OVERSAMPLING = 32
POWER_PASSES = 2
# what keeps new copies of an MLP apart where there are several, as a share of the entries of W12
COPY_NOISE = 0.01
# singular values below this share of the largest are rounding noise of a float32 matrix
RANK_TOLERANCE = 1e-6


def seeded_generator(seed: int, name: str) -> torch.Generator:
    """Return a random generator for one tensor, independent of the order in which tensors are made."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def check_finite(weight: Tensor, name: str) -> None:
    """Refuse a weight that cannot be decomposed, since it holds NaN or infinity."""
    # one of the two is not finite if any value is not
    if not torch.stack(torch.aminmax(weight)).isfinite().all():
        bad = sum(int((~torch.isfinite(chunk)).sum()) for chunk in _chunks(weight, 0))
        raise CheckpointError(Problem("weight-not-finite", name, count=bad, total=weight.numel()))


def _chunks(weight: Tensor, axis: int) -> Iterator[Tensor]:
    size = max(1, CHUNK_ELEMENTS // max(1, weight.shape[1 - axis])) if weight.dim() == 2 else CHUNK_ELEMENTS
    return iter(torch.split(weight, size, dim=axis))


@contextlib.contextmanager
def _bfloat16_products(dtype: torch.dtype) -> Iterator[None]:
    """Let the processor multiply in bfloat16 and add in float32, which is exact for what is stored in bfloat16."""
    # only processors that have such an instruction do so (AVX512-BF16, AMX), and PyTorch from 2.9 on
    products = getattr(torch.backends.mkldnn, "matmul", None)
    if dtype != torch.bfloat16 or products is None:
        yield
        return
    before = products.fp32_precision
    products.fp32_precision = "bf16"
    try:
        yield
    finally:
        products.fp32_precision = before


def gram(weight: Tensor, method: SvdMethod) -> Tensor:
    """Compute the smaller of W^T W and W W^T, (n, n) with n = min(d_out, d_in), of a weight (d_out, d_in)."""
    # one triangle is added up chunk by chunk along the longer axis: "exact" in float64, "fast" in float32
    axis = 0 if weight.shape[0] >= weight.shape[1] else 1
    n, dtype = min(weight.shape), torch.float64 if method == "exact" else torch.float32
    total = torch.zeros(n, n, dtype=dtype, device=weight.device)
    bands = [slice(start, start + GRAM_COLUMNS) for start in range(0, n, GRAM_COLUMNS)]
    with _bfloat16_products(weight.dtype):
        for chunk in _chunks(weight, axis):
            part = chunk.to(total.dtype) if axis == 0 else chunk.to(total.dtype).T
            for band in bands:
                total[band, band.start :].addmm_(part[:, band].T, part[:, band.start :])
    for band in bands:
        total[band.stop :, band] = total[band, band.stop :].T
    return total


def leading_eigenpairs(
    matrix: Tensor, count: int, method: SvdMethod, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Compute leading eigenvalues (count,), descending, and eigenvectors (n, count) of a Gram matrix (n, n)."""
    n = matrix.shape[0]
    width = min(n, count + OVERSAMPLING)
    # "exact" is a full eigendecomposition; "fast" is a randomized range finder with power passes, which gives way to
    # the eigendecomposition where it would look for more than half of the directions
    if method == "exact" or 2 * width > n:
        values, vectors = torch.linalg.eigh(matrix)
        return values[-count:].flip(0), vectors[:, -count:].flip(1)
    start = torch.randn(n, width, generator=generator, dtype=torch.float32).to(matrix)
    basis = torch.linalg.qr(matrix @ start).Q
    for _ in range(POWER_PASSES):
        basis = torch.linalg.qr(matrix @ basis).Q
    values, small = torch.linalg.eigh(basis.T @ matrix @ basis)
    return values[-count:].flip(0), basis @ small[:, -count:].flip(1)


def _singular_values(weight: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
    """Return the roots of eigenvalues of W^T W, or the norm of W v if rounding lost the eigenvalue."""
    roots = values.clamp_min(0).sqrt()
    lost = values < torch.finfo(values.dtype).eps ** 0.5 * values[0]
    if lost.any():
        images = [chunk.to(vectors.dtype) @ vectors[:, lost] for chunk in _chunks(weight, 0)]
        roots[lost] = torch.cat(images).norm(dim=0)
    return roots


def mean_row_norm(weight: Tensor) -> float:
    """Compute the mean Euclidean norm of the rows in float32."""
    norms = [chunk.float().norm(dim=1).sum().item() for chunk in _chunks(weight, 0)]
    return float(sum(norms) / weight.shape[0])


def principal_rows(weight: Tensor, count: int, method: SvdMethod, generator: torch.Generator) -> Tensor:
    """Compute the leading principal coordinates of the outputs, (r, d_in): U_r^T W = S_r V_r^T."""
    values, vectors = leading_eigenpairs(gram(weight, method), count, method, generator)
    if weight.shape[0] >= weight.shape[1]:
        rows = _singular_values(weight, values, vectors)[:, None] * vectors.T
    else:
        rows = torch.cat([vectors.T @ chunk.to(vectors.dtype) for chunk in _chunks(weight, 1)], dim=1)
    # the sign of each row is fixed (its largest entry is positive), so that equal inputs give equal files
    return _fix_signs(rows)


def _fix_signs(rows: Tensor) -> Tensor:
    largest = rows.gather(1, rows.abs().argmax(dim=1, keepdim=True))
    return rows * torch.where(largest < 0, -1.0, 1.0).to(rows)


def _rescale_and_fill(rows: Tensor, rank: int, norm: float, generator: torch.Generator) -> Tensor:
    """Scale the first `rank` rows to the mean norm `norm`, and make the others random rows of that norm."""
    kept = rows[:rank].float()
    scale = norm / max(float(kept.norm(dim=1).mean()), 1e-30) if rank else 0.0
    random = torch.randn(rows.shape[0] - rank, rows.shape[1], generator=generator, dtype=torch.float32)
    random = random * (norm / random.norm(dim=1, keepdim=True).clamp_min(1e-30))
    return torch.cat((kept * scale, random.to(kept.device)))


def svd_w21(weight: Tensor, up_out: int, method: SvdMethod, generator: torch.Generator) -> Tensor:
    """Build W21 (up_out, d_in), through which the up stream reads the base stream.

        W = U S V^T,   W21 = c U_r^T W = c S_r V_r^T,   r = up_out

    c makes the mean row norm that of W, so new outputs have the size of old ones. Where r exceeds the rank of W,
    the remaining rows are random, of the same norm. Rows are float32, by descending singular value. No
    promise depends on this block.
    """
    rows = principal_rows(weight, min(up_out, *weight.shape), method, generator)
    norms = rows.norm(dim=1)
    rank = int((norms > RANK_TOLERANCE * norms[0]).sum())
    padded = torch.nn.functional.pad(rows, (0, 0, 0, up_out - rows.shape[0]))
    return _rescale_and_fill(padded, rank, mean_row_norm(weight), generator)


def svd_w22(weight: Tensor, up_out: int, up_in: int, method: SvdMethod, generator: torch.Generator) -> Tensor:
    """Build W22 (up_out, up_in) as W seen in its own leading coordinates on both sides: c U_r^T W V_c = c diag(S)."""
    # this repeats the paper's (0, SVD) pair, which also names no formula; the choice is ours
    count = min(up_out, up_in, *weight.shape)
    values = principal_rows(weight, count, method, generator).norm(dim=1)
    rank = int((values > RANK_TOLERANCE * values[0]).sum())
    block = torch.zeros(up_out, up_in, device=weight.device)
    block[range(count), range(count)] = values.float()
    # rows without a singular value are random, of the same norm
    return _rescale_and_fill(block, rank, mean_row_norm(weight), generator)


def random_block(up_out: int, inputs: int, generator: torch.Generator) -> Tensor:
    """Make a block with He's normal initialisation: standard deviation sqrt(2 / inputs), float32."""
    block: Tensor = torch.randn(up_out, inputs, generator=generator, dtype=torch.float32) * (2.0 / inputs) ** 0.5
    return block


def svd_embedding(weight: Tensor, up: int, method: SvdMethod, generator: torch.Generator) -> Tensor:
    """Make new columns (v, up), float32, of the embedding E (v, d): E V_r, of E's mean row norm."""
    axis = 0 if weight.shape[0] >= weight.shape[1] else 1
    if axis == 0:
        _, vectors = leading_eigenpairs(gram(weight, method), min(up, weight.shape[1]), method, generator)
        directions = _fix_signs(vectors.T)
    else:
        rows = principal_rows(weight, min(up, weight.shape[0]), method, generator)
        directions = rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-30)
    columns = torch.cat([(chunk.to(directions.dtype) @ directions.T).float() for chunk in _chunks(weight, 0)])
    scale = mean_row_norm(weight) / max(mean_row_norm(columns), 1e-30)
    return torch.nn.functional.pad(columns * scale, (0, up - columns.shape[1]))


def copied_w12(weight: Tensor, copies: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """Make W12 (d_out, copies * d_in) of a grown down projection: W / (copies + 1), once for each new copy.

        W12_j = W / k + N_j - N_(j+1),   k = copies + 1,   N_0 = N_copies,   N = 0 for one new copy

    Several new copies that were equal would get equal gradients, would stay equal, and be worth one (ours; the noise
    of each has a hundredth of the entries' root mean square). Copies read the same features at first, so that the
    noise, whose differences add up to zero, adds nothing.
    """
    share = weight.float() / (copies + 1)
    if copies == 1:
        return share.to(dtype)
    size = COPY_NOISE * float(share.square().mean().sqrt()) / 2**0.5
    first = torch.randn(weight.shape, generator=generator) * size
    made, noise = weight.new_empty(weight.shape[0], copies * weight.shape[1], dtype=dtype), first
    for number, part in enumerate(made.chunk(copies, dim=1), 1):
        following = first if number == copies else torch.randn(weight.shape, generator=generator) * size
        part.copy_(share + noise - following)
        noise = following
    return made
