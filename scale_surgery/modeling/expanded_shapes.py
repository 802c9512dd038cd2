"""Tensors that an expansion adds to a module, by its kind: names and shapes. One with a side of 0 does not exist.

    linear              w12 (out, up in)   w21 (up out, in)   w22 (up out, up in)   up_bias (up out)
    grown               the same, and copies that train in place of the base: w11 (out, in)   bias11 (out)
    norm                up_weight (up)   up_bias (up)
    embedding, head     up_weight (rows, up)   new_rows (new tokens, in)
    padding             new_rows (new tokens, in), of an embedding without an up part
    block               w12 (out, inner)   w21 (inner, in)   w22 (inner, up)   up_weight (up, inner)
    gated variant       gate (in + up in + 1) of modules that write into the base stream or the logits

Planning and loading use the same list. Planning imports this file without torch.
"""

from __future__ import annotations

from typing import Any


def shapes_of(
    spec: dict[str, Any], rows: int = 0, *, has_bias: bool = False, has_w12: bool = False, is_gated: bool = False
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an expansion's tensors at a module, by name.

    Args:
        spec: Entry of the module in config.json.
        rows: Rows of the weight of an embedding or a head; new tokens come after them.
        has_bias: Whether the module has a bias.
        has_w12: Whether the expansion writes into its base stream.
        is_gated: Whether the expansion writes through gates.
    """
    kind = spec["kind"]
    if is_gated and (has_w12 or kind == "head"):
        inputs = spec["in_features"] if kind == "linear" else (spec.get("base", 0), spec["up"])
        shapes = shapes_of(spec, rows, has_bias=has_bias, has_w12=has_w12)
        return {**shapes, "gate": ((sum(inputs) + 1) * bool(inputs[1]),)}
    if kind in ("linear", "grown"):
        base_in, up_in = spec["in_features"]
        base_out, up_out = (sum(widths) for widths in zip(*spec["out_features"], strict=True))
        trained = base_out if spec.get("trains_base") else 0
        blocks = {"w12": (base_out, up_in if has_w12 else 0), "w21": (up_out, base_in), "w22": (up_out, up_in)}
        copies = {"w11": (trained, base_in), "bias11": (trained * has_bias,)} if kind == "grown" else {}
        return {**blocks, "up_bias": (up_out * has_bias,), **copies}
    if kind == "block":
        base, up, inner = spec["base"], spec["up"], spec.get("inner", 0)
        blocks = {"w12": (base, inner if has_w12 else 0), "w21": (inner, base), "w22": (inner, up)}
        return blocks | {"up_weight": (up, inner)}
    if kind == "norm":
        return {"up_weight": (spec["up"],), "up_bias": (spec["up"] if has_bias else 0,)}
    if kind in ("embedding", "padding", "head"):
        new = spec.get("new_tokens", 0)
        up, added = 0 if kind == "padding" else spec["up"], 0 if spec.get("is_tied") else new
        return {"up_weight": (rows + new, up), "new_rows": (added, spec.get("base", 0))}
    return {}
