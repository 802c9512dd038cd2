"""Blocks of the same shape in one product for K expansions, or each by itself: are they bit-equal, and what is saved?

    python -m benchmarks.batched_blocks -o numbers.json

W21 x + W22 x_up for K up streams that read one base stream. `single` is what expanded linears do; `wide` stacks all W21
into one matrix; `batched` hands them to one batched product. W22 is batched in both. Several layers take turns, so that
weights come from memory, as in a model.

bit-equal   of the K results, those that are bit for bit the single ones
x single    processor time of the single products divided by this one's, median over rounds
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from statistics import median

import click
import torch
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from benchmarks.device import Place, publish, timed
from scale_surgery.modeling.expanded_streams import add_product

# (inputs, up inputs, up outputs): q, gate and down of the model of `many_paths`; sizes that do not fill cache lines
SHAPES = [(512, 64, 64), (512, 64, 224), (1792, 224, 64), (520, 72, 72), (500, 60, 60), (48, 6, 10)]
LAYERS = 8


@dataclass(frozen=True)
class Blocks:
    """Blocks of one layer: of all expansions together (k, out, in), and the same tensors each in memory of its own."""

    w21: Tensor
    w22: Tensor
    apart: list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Compared:
    """One way of computing in one case."""

    dtype: str
    shape: tuple[int, int, int]
    tokens: int
    way: str
    bit_equal: int
    times_faster: float


def single(blocks: Blocks, x: Tensor, ups: list[Tensor], _: Tensor) -> list[Tensor]:
    """Each by itself."""
    pairs = zip(blocks.apart, ups, strict=True)
    return [add_product(functional.linear(x, w21), up, w22) for (w21, w22), up in pairs]


def wide(blocks: Blocks, x: Tensor, _: list[Tensor], stacked: Tensor) -> list[Tensor]:
    """All W21 as one matrix."""
    y = functional.linear(x[0], blocks.w21.flatten(0, 1)).view(x.shape[1], len(stacked), -1).transpose(0, 1)
    return list(torch.baddbmm(y, stacked, blocks.w22.mT))


def batched(blocks: Blocks, x: Tensor, _: list[Tensor], stacked: Tensor) -> list[Tensor]:
    """All W21 in one batched product."""
    y = torch.bmm(x.expand(len(stacked), -1, -1), blocks.w21.mT)
    return list(y.baddbmm_(stacked, blocks.w22.mT))


WAYS = (single, wide, batched)


def make_blocks(shape: tuple[int, int, int], count: int, dtype: torch.dtype) -> Blocks:
    """Random blocks."""
    inputs, up_in, up_out = shape
    w21, w22 = (torch.randn(count, up_out, width).mul_(width**-0.5).to(dtype) for width in (inputs, up_in))
    return Blocks(w21, w22, [(first.clone(), second.clone()) for first, second in zip(w21, w22, strict=True)])


def compare(shape: tuple[int, int, int], tokens: int, count: int, dtype: torch.dtype, rounds: int) -> list[Compared]:
    """Compare all ways on the same numbers."""
    layers = [make_blocks(shape, count, dtype) for _ in range(LAYERS)]
    x = torch.randn(1, tokens, shape[0]).to(dtype)
    ups = [torch.randn(1, tokens, shape[1]).to(dtype) for _ in range(count)]
    stacked = torch.cat(ups)
    expected = single(layers[0], x, ups, stacked)
    calls: dict[str, Callable[[], None]] = {}
    equal: dict[str, int] = {}
    for way in WAYS:
        outputs, turn = way(layers[0], x, ups, stacked), cycle(layers)
        equal[way.__name__] = sum(
            torch.equal(output.view_as(reference), reference)
            for output, reference in zip(outputs, expected, strict=True)
        )
        # many times one after the other: a product of one token takes less than a clock tells
        calls[way.__name__] = lambda way=way, turn=turn: [
            way(next(turn), x, ups, stacked) for _ in range(max(1, 512 // tokens))
        ]
    place = Place("cpu", "float32", 1)
    taken = {name: [timed(call, place)[1] for call in [call] * (rounds + 1)][1:] for name, call in calls.items()}
    faster = {name: median(taken["single"]) / median(seconds) for name, seconds in taken.items()}
    return [Compared(str(dtype)[6:], shape, tokens, name, equal[name], faster[name]) for name in calls]


def render(comparisons: list[Compared], count: int) -> Table:
    """Lay out all cases as a table."""
    table = Table(title=f"{count} expansions")
    for column in ("dtype", "in, up in, up out", "tokens", "way", "bit-equal", "x single"):
        table.add_column(column)
    for comparison in comparisons:
        if comparison.way != "single":
            shape = ", ".join(map(str, comparison.shape))
            equal = f"{comparison.bit_equal} of {count}"
            table.add_row(
                comparison.dtype, shape, str(comparison.tokens), comparison.way, equal, f"{comparison.times_faster:.2f}"
            )
    return table


@click.command()
@click.option("--count", default=8, show_default=True, help="Expansions.")
@click.option("--rounds", default=5, show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File for the numbers.")
@click.option("--markdown", type=click.Path(path_type=Path), help="File for the table.")
@torch.no_grad()
def main(count: int, rounds: int, output: Path | None, markdown: Path | None) -> None:
    """Measure, and print a table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    comparisons = [
        comparison
        for dtype in (torch.float32, torch.bfloat16)
        for shape in SHAPES
        for tokens in (1, 4, 128, 1024)
        for comparison in compare(shape, tokens, count, dtype, rounds)
    ]
    publish(
        [render(comparisons, count)],
        {"count": count, "compared": [asdict(comparison) for comparison in comparisons]},
        output,
        markdown,
    )


if __name__ == "__main__":
    main()
