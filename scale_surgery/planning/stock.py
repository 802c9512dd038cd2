"""The stock form of an expanded model: how large it is, what padding costs, and why there may be none.

Where the residual stream is not widened, old and new heads, and old and new inner features, can stand in one matrix
of the base's own architecture. That has one number of heads and one inner width for all layers: layers that were not
expanded are padded with zeros.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from scale_surgery.planning.families import Family, Sizes
from scale_surgery.planning.specs import Widths, expected_shapes, find_prefix


@dataclass(frozen=True)
class StockWidths:
    """What may differ between a base model and its stock form: heads, and features inside the MLP."""

    query_heads: int
    key_value_heads: int
    inner: int


@dataclass(frozen=True)
class StockCost:
    """What the stock form of an expanded model costs.

    Attributes:
        parameters: Parameters of the stock form as stored.
        parameters_expanded: Parameters of the expanded model as stored.
        padding: The difference: zeros, so that all layers have the same widths.
        before: Heads and inner width of the base model.
        after: Heads and inner width of the stock form.
    """

    parameters: int
    parameters_expanded: int
    padding: int
    before: StockWidths
    after: StockWidths


def stock_sizes(family: Family, sizes: Sizes, widths: Widths) -> Sizes:
    """Sizes of the stock form: those of the base model with more heads and a larger inner width.

    Args:
        family: Facts of the architecture.
        sizes: Sizes of the base model.
        widths: What is added.

    Returns:
        The sizes; where the stock config wants a number of query heads that divides the hidden size, so many
        that it does.
    """
    shared = sizes.queries_per_key_value
    heads = sizes.key_value_heads + widths.up_kv_heads
    if widths.up_kv_heads and family.heads_divide_hidden:
        fitting = (count for count in range(heads, sizes.hidden + 1) if sizes.hidden % (count * shared) == 0)
        heads = next(fitting, heads)
    return replace(sizes, query_heads=heads * shared, key_value_heads=heads, inner=sizes.inner + widths.up_inner_width)


def stock_shapes(family: Family, sizes: Sizes, widths: Widths, names: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Shapes on disk of the tensors that are larger in the stock form, in every layer.

    Args:
        family: Facts of the architecture.
        sizes: Sizes of the base model.
        widths: What is added.
        names: Names of the base model's tensors.

    Returns:
        Shapes by name, weights and biases.
    """
    before = _linear_shapes(family, sizes, names)
    after = _linear_shapes(family, stock_sizes(family, sizes, widths), names)
    return {name: shape for name, shape in after.items() if shape != before[name]}


def _linear_shapes(family: Family, sizes: Sizes, names: Collection[str]) -> dict[str, tuple[int, ...]]:
    linears = tuple(f".{linear.name}.weight" for linear in family.linears)
    expected = expected_shapes(family, sizes, find_prefix(family, names))
    shapes = {name: shape for name, shape in expected.items() if name.endswith(linears)}
    for name, shape in list(shapes.items()):
        bias = f"{name.removesuffix('.weight')}.bias"
        if bias in names:
            shapes[bias] = (shape[-1] if family.transposed else shape[0],)
    return shapes


def cost_of_stock(
    family: Family, sizes: Sizes, widths: Widths, names: Collection[str], parameters: tuple[int, int]
) -> StockCost:
    """Count what the stock form costs; no weight is read.

    Args:
        family: Facts of the architecture.
        sizes: Sizes of the base model.
        widths: What is added; the up width is 0.
        names: Names of the base model's tensors.
        parameters: Parameters of the base model as stored, and parameters added.

    Returns:
        The cost.
    """
    before = _linear_shapes(family, sizes, names)
    larger = stock_shapes(family, sizes, widths, names)
    count = parameters[0] + sum(prod(shape) - prod(before[name]) for name, shape in larger.items())
    return StockCost(
        parameters=count,
        parameters_expanded=sum(parameters),
        padding=count - sum(parameters),
        before=_widths_of(sizes),
        after=_widths_of(stock_sizes(family, sizes, widths)),
    )


def _widths_of(sizes: Sizes) -> StockWidths:
    return StockWidths(sizes.query_heads, sizes.key_value_heads, sizes.inner)


def stock_problems(family: Family, sizes: Sizes, widths: Widths, config: Mapping[str, Any]) -> Iterator[str]:
    """Why widths have no stock form.

    Args:
        family: Facts of the architecture.
        sizes: Sizes of the base model.
        widths: What is added.
        config: Parsed config.json of the base model.

    Yields:
        The reasons; none where there is a stock form.
    """
    if widths.up_width:
        yield (
            f"--to stock: the residual stream is {widths.up_width} features wider than the base's {sizes.hidden}, "
            "expected an up width of 0: a stock class has one stream, whose norms, embedding and head know no second "
            "one. Merge --to fused, or expand with --variant adapt --up-width 0."
        )
    reason = _heads_problem(family, config)
    if widths.up_kv_heads and reason:
        yield (
            f"--to stock: {widths.up_kv_heads} key/value heads were added, expected none for a {family.model_type} "
            f"model: {reason}. Merge --to fused, or expand with --up-kv-heads 0."
        )


def _heads_problem(family: Family, config: Mapping[str, Any]) -> str | None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if family.heads_fix_rope and rope.get("short_factor"):
        return "its config wants as many rope factors as the hidden size over the query heads asks for"
    return family.fixed_heads
