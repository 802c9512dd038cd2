"""The stock form of an expanded model: how large it is, what padding costs, and why there may be none.

Where the residual stream is not widened, old and new heads, and old and new inner features, can stand in one matrix
of the base's own architecture. That has one number of heads and one inner width for all layers: layers that were not
expanded are padded with zeros.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from math import prod

from scale_surgery.errors import Problem
from scale_surgery.planning.architecture import Architecture, Linear, Sizes
from scale_surgery.planning.specs import LinearWidths, Widths
from scale_surgery.planning.stored import find_prefix, module_path

# the first wide layer of a fused model whose embedding has the up stream already
IN_EMBEDDING = -1


@dataclass(frozen=True)
class StockWidths:
    """Sizes in which the stock form may differ from the base: heads, and features inside the MLP."""

    query_heads: int
    key_value_heads: int
    inner: int


@dataclass(frozen=True)
class StockCost:
    """Cost of the stock form of an expanded model.

    Attributes:
        parameters: Parameters of the stock form as stored.
        padding: Those that the expanded model does not have: zeros, so that all layers have the same widths.
        before: Heads and inner width of the base model.
        after: Heads and inner width of the stock form.
    """

    parameters: int
    padding: int
    before: StockWidths
    after: StockWidths


def stock_sizes(architecture: Architecture, sizes: Sizes, widths: Widths) -> Sizes:
    """Sizes of the stock form: those of the base model with more heads and a larger inner width."""
    shared = sizes.queries_per_key_value
    heads = sizes.key_value_heads + widths.up_kv_heads
    # where the stock config wants a number of query heads that divides the hidden size, so many that it does
    if widths.up_kv_heads and architecture.heads_divide_hidden:
        fitting = (count for count in range(heads, sizes.hidden + 1) if sizes.hidden % (count * shared) == 0)
        heads = next(fitting, heads)
    return replace(
        sizes,
        query_heads=heads * shared,
        key_value_heads=heads,
        inner=sizes.inner + widths.up_inner_width,
        vocabulary=sizes.vocabulary + widths.new_tokens,
    )


def stock_shapes(
    architecture: Architecture, sizes: Sizes, widths: Widths, names: Collection[str], head: str
) -> dict[str, tuple[int, ...]]:
    """Shapes on disk, by name, of the weights and biases that are larger in the stock form, in every layer."""
    before = _shapes(architecture, sizes, names, head)
    after = _shapes(architecture, stock_sizes(architecture, sizes, widths), names, head)
    return {name: shape for name, shape in after.items() if shape != before[name]}


def linear_streams(linear: Linear, sizes: Sizes) -> LinearWidths:
    """Return inputs and outputs of a linear, without added features, if all layers are alike."""
    query, key_value = sizes.query_heads * sizes.head_size, sizes.key_value_heads * sizes.head_size
    streams = {"residual": sizes.hidden, "query": query, "key_value": key_value, "inner": sizes.inner}
    return LinearWidths([streams[linear.reads], 0], [[streams[stream], 0] for stream in linear.writes()])


def _shapes(architecture: Architecture, sizes: Sizes, names: Collection[str], head: str) -> dict[str, tuple[int, ...]]:
    """Shapes of what may be larger: embedding and head, and linears of every layer."""
    prefix = find_prefix(architecture, names)
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}{architecture.embedding_weight}": (sizes.embedded, sizes.hidden)}
    parts = {"weight": (sizes.vocabulary, sizes.hidden), "bias": (sizes.vocabulary,)}
    shapes |= {name: shape for part, shape in parts.items() if (name := f"{head}.{part}") in names}
    for layer in range(sizes.layers * architecture.is_uniform):
        for linear in architecture.kind(layer).linears:
            wide = linear_streams(linear, sizes)
            shape = (sum(size for size, _ in wide.outputs), wide.inputs[0])
            name = module_path(architecture, prefix, layer, linear.name)
            shapes[f"{name}.weight"] = shape[::-1] if architecture.transposed else shape
            if (bias := f"{name}.bias") in names:
                shapes[bias] = shape[:1]
    return shapes


def cost_of_stock(
    architecture: Architecture,
    sizes: Sizes,
    widths: Widths,
    names: Collection[str],
    head: str,
    parameters: tuple[int, int],
) -> StockCost:
    """Count what the stock form costs, from the parameters of the base as stored and those added; no weight is read."""
    # the up width is 0: see `stock_problems`
    before = _shapes(architecture, sizes, names, head)
    larger = stock_shapes(architecture, sizes, widths, names, head)
    count = parameters[0] + sum(prod(shape) - prod(before[name]) for name, shape in larger.items())
    return StockCost(
        parameters=count,
        padding=count - sum(parameters),
        before=_widths_of(sizes),
        after=_widths_of(stock_sizes(architecture, sizes, widths)),
    )


def _widths_of(sizes: Sizes) -> StockWidths:
    return StockWidths(sizes.query_heads, sizes.key_value_heads, sizes.inner)


def stock_problems(
    architecture: Architecture, sizes: Sizes, widths: Widths, *, has_gates: bool = False
) -> Iterator[Problem]:
    """Yield why widths, or gates, have no stock form; nothing if they have one."""
    place = "--to stock"
    if has_gates:
        yield Problem("stock-gates", place)
    if widths.up_width:
        yield Problem("stock-stream-wider", place, added=widths.up_width, hidden=sizes.hidden)
    if widths == Widths(new_tokens=widths.new_tokens):
        # their rows lie outside the layers
        return
    if not architecture.is_uniform:
        yield Problem("stock-several-kinds", place)
    elif widths.up_kv_heads and architecture.fixed_heads:
        heads, family = widths.up_kv_heads, architecture.model_type
        yield Problem("stock-heads-fixed", place, heads=heads, family=family, reason=architecture.fixed_heads)
    elif widths.up_inner_width and "inner" not in architecture.keys:
        yield Problem("stock-inner-fixed", place)


def first_wide_layer(architecture: Architecture, layers: Collection[int]) -> int:
    """The first layer of a fused model whose input has an up stream; `IN_EMBEDDING` where the embedding has it."""
    first = min(layers, default=len(architecture.kind_of_layer))
    # below the first expanded layer the up stream is zero, so it needs not be there; but the stock code may have stored
    # the width of what enters the layers, and expect it after the last norm
    is_early = first == 0 or architecture.keeps_width
    return IN_EMBEDDING if is_early and architecture.enters == "embedding" else first


def fused_problems(architecture: Architecture, layers: Collection[int]) -> list[Problem]:
    """List the blocks for which an expansion has no fused form; none if it has one."""
    # what lies below is as in the base
    numbers = architecture.kind_of_layer[max(first_wide_layer(architecture, layers), 0) :]
    kinds = [architecture.kinds[number] for number in dict.fromkeys(numbers)]
    blocks = dict.fromkeys(block.name for kind in kinds for block in kind.blocks if block.is_whole)
    return [Problem("block-not-fused", "--to fused", block=name) for name in blocks]
