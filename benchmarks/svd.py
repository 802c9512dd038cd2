"""Compare the decompositions of blocks.py with torch.linalg.svd: seconds, and agreement of the subspaces.

    python benchmarks/svd.py
    python benchmarks/svd.py --matrix q_proj --spectrum decaying

Matrices have the sizes of an 8B Llama's, in bfloat16 as in a checkpoint, and one of three spectra:

flat      independent normal entries: neighbouring singular values hardly differ, so the leading subspace is
          ill-defined, and no randomized method can be expected to find the one that an exact method finds
decaying  s_i = i^-1/2, a heavy tail as trained weights have; neighbours at the cut differ by 1 / 2r
gap       the same, with a tail ten times smaller after the cut: here the subspace is well defined

With V_r the leading right singular vectors found by torch.linalg.svd in float32 and Q the rows of W21:

overlap   mean squared cosine of the principal angles between V_r and Q; 1 is equal, r / n is by chance
angle     largest principal angle in degrees; its sine is the distance of the two projectors
energy    ||W Q^T||^2 over the most that any r directions can have: what matters to W21
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from scale_surgery.tensors import blocks

# what a plan with the default ratio of 1/8 asks of an 8B Llama: rows, columns, rows of W21
MATRICES = {
    "k_proj": (1024, 4096, 128),
    "q_proj": (4096, 4096, 512),
    "down_proj": (4096, 14336, 512),
    "gate_proj": (14336, 4096, 1792),
}
SPECTRA = ("flat", "decaying", "gap")
METHODS: tuple[blocks.SvdMethod, ...] = ("exact", "fast")


@dataclass(frozen=True)
class Agreement:
    """How a subspace lies to the reference; see the module."""

    overlap: float
    angle: float
    energy: float


@dataclass(frozen=True)
class Comparison:
    """One matrix decomposed in three ways."""

    matrix: str
    spectrum: str
    rows: int
    columns: int
    count: int
    seconds: dict[str, float]
    agreement: dict[str, Agreement]


def make_matrix(rows: int, columns: int, count: int, spectrum: str, generator: torch.Generator) -> Tensor:
    """Make a random matrix (rows, columns) with a given spectrum, bfloat16."""
    if spectrum == "flat":
        return torch.randn(rows, columns, generator=generator).bfloat16()
    small = min(rows, columns)
    left = torch.linalg.qr(torch.randn(rows, small, generator=generator)).Q
    right = torch.linalg.qr(torch.randn(columns, small, generator=generator)).Q
    values = torch.arange(1, small + 1).float().rsqrt()
    if spectrum == "gap":
        values[count:] /= 10
    return ((left * values) @ right.T).bfloat16()


def timed(work: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """Run something once; its result and seconds."""
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


def right_vectors(weight: Tensor, count: int) -> Tensor:
    """The leading right singular vectors by a full SVD, as rows."""
    return torch.linalg.svd(weight.float(), full_matrices=False).Vh[:count]


def agree(weight: Tensor, reference: Tensor, rows: Tensor) -> Agreement:
    """Compare, in float64, the space that independent rows (r, d_in) span with that of an orthonormal reference."""
    best = torch.linalg.qr(reference.double().T).Q
    basis = torch.linalg.qr(rows.double().T).Q
    beyond = basis - best @ (best.T @ basis)
    sines = torch.linalg.eigvalsh(beyond.T @ beyond).clamp(0, 1).sqrt()
    energy = (weight.float() @ basis.float()).double().square().sum()
    most = (weight.float() @ best.float()).double().square().sum()
    return Agreement(
        overlap=float(1 - sines.square().mean()),
        angle=float(sines[-1].arcsin().rad2deg()),
        energy=float(energy / most),
    )


def compare(matrix: str, spectrum: str, sizes: tuple[int, int, int], seed: int = 0) -> Comparison:
    """Decompose one random matrix by torch.linalg.svd and by both methods of blocks.py."""
    rows, columns, count = sizes
    weight = make_matrix(rows, columns, count, spectrum, torch.Generator().manual_seed(seed))
    reference, seconds = timed(lambda: right_vectors(weight, count))
    comparison = Comparison(matrix, spectrum, rows, columns, count, {"svd": seconds}, {})
    for method in METHODS:
        generator = blocks.seeded_generator(seed, matrix)
        directions, seconds = timed(lambda: blocks.principal_rows(weight, count, method, generator))  # noqa: B023
        comparison.seconds[method] = seconds
        comparison.agreement[method] = agree(weight, reference, directions)
    return comparison


def render(comparisons: list[Comparison]) -> Table:
    """Lay comparisons out as a table."""
    table = Table("matrix", "r", "spectrum", "svd s", "exact s", "fast s", "method", "overlap", "angle", "energy")
    for comparison in comparisons:
        size = f"{comparison.matrix} {comparison.rows}x{comparison.columns}"
        times = [f"{comparison.seconds[name]:.1f}" for name in ("svd", *METHODS)]
        for method, agreement in comparison.agreement.items():
            lead = [size, str(comparison.count), comparison.spectrum, *times] if method == METHODS[0] else [""] * 6
            table.add_row(
                *lead, method, f"{agreement.overlap:.6f}", f"{agreement.angle:.4f}", f"{agreement.energy:.6f}"
            )
    return table


@click.command()
@click.option("--matrix", "names", type=click.Choice(list(MATRICES)), multiple=True, help="Default: all.")
@click.option("--spectrum", "spectra", type=click.Choice(SPECTRA), multiple=True, help="Default: all.")
@click.option("--seed", default=0, show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the numbers as JSON.")
def main(names: tuple[str, ...], spectra: tuple[str, ...], seed: int, output: Path | None) -> None:
    """Compare the decompositions of blocks.py with torch.linalg.svd."""
    console = Console(width=120)
    done: list[Comparison] = []
    for name, spectrum in itertools.product(names or MATRICES, spectra or SPECTRA):
        done.append(compare(name, spectrum, MATRICES[name], seed))
        console.print(render(done[-1:]))
        if output is not None:
            output.write_text(
                json.dumps([asdict(comparison) for comparison in done], indent=2) + "\n", encoding="utf-8"
            )
    console.print(render(done))


if __name__ == "__main__":
    main()
