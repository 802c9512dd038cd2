"""Rows of a plan's table that only one method has."""

from __future__ import annotations

from collections.abc import Callable

from scale_surgery.planning.idle import idle_tensors
from scale_surgery.planning.plan import Plan
from scale_surgery.planning.scale import resolve_widths
from scale_surgery.planning.selection import format_layers

# shares of widths that differ more from the ratio are explained
SHARE_TOLERANCE = 0.2


def _rows_of_scale(plan: Plan) -> list[tuple[str, str]]:
    """Return collaboration, widths and initialisation."""
    if not plan.layers:
        return []
    request, collaborative = plan.request, plan.collaboration
    groups = f" ({' and '.join(collaborative.groups)})" if collaborative.groups else ""
    rows = [
        ("collaborative", format_layers(collaborative.layers) + groups),
        ("added widths", plan.widths.description),
        ("share of base", _shares(plan)),
        ("initialisation", f"W21 {request.init_w21}, W22 {request.init_w22}, {request.svd} SVD"),
    ]
    count = sum(tensor.elements for tensor in idle_tensors(plan))
    idle = f"{count:,} of the new parameters: the up stream is zero in layer {plan.layers[0]}"
    return [*rows, ("never learn", idle)] if count else rows


def _shares(plan: Plan) -> str:
    """Return the added widths as shares of the base's, and why they differ from the ratio."""
    sizes, widths, request = plan.sizes, plan.widths, plan.request
    pairs = {
        "residual stream": (widths.up_width, sizes.hidden),
        "key/value heads": (widths.up_kv_heads, sizes.key_value_heads),
        "inner": (widths.up_inner_width, sizes.inner),
    }
    shares = ", ".join(f"{name} {up / base:.1%}" for name, (up, base) in pairs.items() if base)
    asked = resolve_widths(sizes, request)
    reasons = []
    if widths.up_width < asked.up_width:
        reasons.append(
            f"up width {widths.up_width} instead of {asked.up_width}, so that the new columns of the head cost at "
            "most as much as the layers (--up-width sets it)"
        )
    if sizes.key_value_heads and request.up_kv_heads is None:
        one = f"1 key/value head is {1 / sizes.key_value_heads:.1%} of {sizes.key_value_heads}"
        share = widths.up_kv_heads / sizes.key_value_heads / request.ratio
        if not widths.up_kv_heads:
            reasons.append(f"no new heads: {one}, more than twice the share (--up-kv-heads 1 adds it)")
        elif not 1 - SHARE_TOLERANCE <= share <= 1 + SHARE_TOLERANCE:
            reasons.append(f"heads are added whole: {one} (--up-kv-heads sets how many)")
    return (
        "; ".join([f"{shares}. --ratio {request.ratio:g} asks for {request.ratio:.1%}", *reasons]) + "."
        if reasons
        else shares
    )


def _rows_of_grow(plan: Plan) -> list[tuple[str, str]]:
    """Return the number of MLPs and the share of each."""
    return [("MLPs in each", f"{plan.request.copies}, each with weight 1/{plan.request.copies}")]


def _rows_of_depth(plan: Plan) -> list[tuple[str, str]]:
    """Return the numbers of the new layers, and their initial values."""
    assert plan.numbering is not None
    new = plan.numbering.new
    return [
        ("new layers", f"{format_layers(new)}  (of {plan.sizes.layers + len(new)} then)"),
        ("initialisation", "copies, which write zeros into the hidden state at first"),
    ]


METHOD_ROWS: dict[str, Callable[[Plan], list[tuple[str, str]]]] = {
    "scale": _rows_of_scale,
    "grow": _rows_of_grow,
    "depth": _rows_of_depth,
}
