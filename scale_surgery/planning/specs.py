"""From a family's facts to module specifications: which stock modules are expanded, and how wide.

What comes out is the content of the key `scale_surgery` in an expanded model's config.json, which the
exported modeling code executes, and the list of new tensors that belong to it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from scale_surgery.planning.families import Family, Sizes

FORMAT = 1
# blocks that take the place of base tensors, and add nothing beside them
REPLACING = ("w11", "bias11")
Spec = dict[str, Any]


@dataclass(frozen=True)
class Widths:
    """What is added: features of the residual stream, key/value heads, and features inside the MLP."""

    up_width: int = 0
    up_kv_heads: int = 0
    up_inner_width: int = 0

    @property
    def description(self) -> str:
        """The widths in one line."""
        return f"residual stream {self.up_width}, key/value heads {self.up_kv_heads}, inner {self.up_inner_width}"


@dataclass(frozen=True)
class Collaboration:
    """Where W12 exists and trains: layers, and groups of linears in them."""

    layers: tuple[int, ...] = ()
    groups: tuple[str, ...] = ()


@dataclass(frozen=True)
class NewTensor:
    """A tensor that the expansion adds.

    Attributes:
        name: Name on disk, the stock module's name and one of w12, w21, w22, up_weight, up_bias.
        shape: Its shape; rows of a block are outputs.
        block: Last part of its name.
        kind: Kind of module it belongs to: linear, norm, embedding or head.
        layer: Its layer, or None outside the layers.
        source: Base tensor that it stands beside.
        is_copy: Whether its values are those of that tensor.
    """

    name: str
    shape: tuple[int, ...]
    block: str
    kind: str
    layer: int | None
    source: str
    is_copy: bool = False


def stream_widths(sizes: Sizes, widths: Widths) -> dict[str, list[int]]:
    """Base and up width of each stream, in features."""
    head = sizes.head_size
    added = widths.up_kv_heads
    return {
        "residual": [sizes.hidden, widths.up_width],
        "query": [sizes.query_heads * head, added * sizes.queries_per_key_value * head],
        "key_value": [sizes.key_value_heads * head, added * head],
        "inner": [sizes.inner, widths.up_inner_width],
    }


def find_prefix(family: Family, names: Collection[str]) -> str:
    """Find what stands before the base model's names on disk: `model.`, or nothing where it was saved alone."""
    with_prefix = f"{family.base_model}."
    return with_prefix if f"{with_prefix}{family.embedding}.weight" in names else ""


def expected_shapes(family: Family, sizes: Sizes, prefix: str) -> dict[str, tuple[int, ...]]:
    """Shapes that the weights of a base model must have on disk, by the family's facts and the config's sizes."""
    streams = stream_widths(sizes, Widths())
    hidden = (sizes.hidden,)
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}{family.embedding}.weight": (sizes.vocabulary, sizes.hidden)}
    shapes[f"{prefix}{family.final_norm}.weight"] = hidden
    for layer in range(sizes.layers):
        path = f"{prefix}{family.layers}.{layer}."
        for norm in family.pre_norms + family.post_norms:
            shapes[f"{path}{norm}.weight"] = hidden
        for inner in family.inner_norms:
            size = sizes.head_size if inner.head_axis is not None else streams[inner.stream][0]
            shapes[f"{path}{inner.name}.weight"] = (size,)
        for linear in family.linears:
            shape = (sum(streams[stream][0] for stream in linear.writes()), streams[linear.reads][0])
            shapes[f"{path}{linear.name}.weight"] = shape[::-1] if family.transposed else shape
    return shapes


def build_specs(
    family: Family, sizes: Sizes, widths: Widths, layers: tuple[int, ...], collaboration: Collaboration
) -> Spec:
    """Say for every stock module whether and how it is expanded.

    Args:
        family: Facts of the architecture.
        sizes: Sizes of the base model.
        widths: What is added.
        layers: The expanded layers.
        collaboration: Where W12 exists.

    Returns:
        The module specifications as plain JSON values.
    """
    streams = stream_widths(sizes, widths)
    return {
        "format": FORMAT,
        "base_model": family.base_model,
        "layers": family.layers,
        "expanded_layers": list(layers),
        "widths": asdict(widths),
        "collaborative": {"layers": list(collaboration.layers), "groups": list(collaboration.groups)},
        "model": _model_specs(family, sizes, widths.up_width, is_embedding_widened=0 in layers),
        "head": {"kind": "head", "base": sizes.hidden, "up": widths.up_width} if widths.up_width else {},
        "expanded": _expanded_specs(family, sizes, streams),
        "passing": _passing_specs(family, sizes.hidden, widths.up_width),
        "attention": {family.attention: _attention_spec(family, sizes, widths)} if widths.up_kv_heads else {},
    }


def _norm_spec(family: Family, sizes: Sizes, base: int, up: int) -> Spec:
    return {"kind": "norm", "base": base, "up": up, "style": family.norm_style, "epsilon": sizes.epsilon}


def _model_specs(family: Family, sizes: Sizes, up: int, *, is_embedding_widened: bool) -> Spec:
    if not up:
        return {}
    padded = {"kind": "passing", "base": None, "up": up}
    specs = {
        family.embedding: {"kind": "embedding", "up": up} if is_embedding_widened else padded,
        family.final_norm: _norm_spec(family, sizes, sizes.hidden, up),
    }
    return specs | ({family.position_embedding: padded} if family.position_embedding else {})


def _expanded_specs(family: Family, sizes: Sizes, streams: Mapping[str, list[int]]) -> Spec:
    specs: Spec = {}
    for linear in family.linears:
        inputs, outputs = streams[linear.reads], [streams[stream] for stream in linear.writes()]
        if linear.fused_by == "head":
            # new heads come after the old ones as a whole
            outputs = [[sum(widths) for widths in zip(*outputs, strict=True)]]
        if inputs[1] or any(up for _, up in outputs):
            specs[linear.name] = {
                "kind": "linear",
                "group": linear.group,
                "in_features": inputs,
                "out_features": outputs,
            }
    base, up = streams["residual"]
    if up:
        specs |= {name: _norm_spec(family, sizes, base, up) for name in family.pre_norms + family.post_norms}
    specs |= _inner_norm_specs(family, sizes, streams)
    base, up = streams["inner"]
    return specs | ({family.activation: {"kind": "activation", "base": base}} if up else {})


def _inner_norm_specs(family: Family, sizes: Sizes, streams: Mapping[str, list[int]]) -> Spec:
    specs = {}
    for norm in family.inner_norms:
        base, up = streams[norm.stream]
        if up and norm.head_axis is None:
            specs[norm.name] = _norm_spec(family, sizes, base, up)
        elif up:
            specs[norm.name] = {"kind": "head_norm", "heads": base // sizes.head_size, "axis": norm.head_axis}
    return specs


def _passing_specs(family: Family, base: int, up: int) -> Spec:
    if not up:
        return {}
    readers = family.pre_norms or tuple(linear.name for linear in family.linears if linear.reads == "residual")
    writers = family.post_norms or tuple(linear.name for linear in family.linears if linear.writes() == ("residual",))
    reading = {name: {"kind": "passing", "base": base, "up": 0} for name in readers}
    return reading | {name: {"kind": "passing", "base": None, "up": up} for name in writers}


def _attention_spec(family: Family, sizes: Sizes, widths: Widths) -> Spec:
    heads = {"heads": sizes.query_heads, "kv_heads": sizes.key_value_heads}
    added = widths.up_kv_heads * sizes.queries_per_key_value
    return heads | attention_values(family, sizes, sizes.query_heads + added)


def attention_values(family: Family, sizes: Sizes, query_heads: int) -> Spec:
    """What an attention module's stock forward has to read where it has so many query heads.

    Args:
        family: Facts of the architecture.
        sizes: Sizes of the base model.
        query_heads: Query heads in all, a multiple of those that share one key/value head.

    Returns:
        Values of the module's attributes and of its config.
    """
    values = {
        "query_heads": query_heads,
        "key_value_heads": query_heads // sizes.queries_per_key_value,
        "query_features": query_heads * sizes.head_size,
    }
    return {
        "attributes": {key: values[name] for key, name in family.attention_attributes.items()},
        "config": {key: values[name] for key, name in family.attention_config.items()},
    }


def new_tensors(
    family: Family, sizes: Sizes, specs: Spec, prefix: str, head: str, biased: frozenset[str]
) -> Iterator[NewTensor]:
    """List every tensor that the specifications add, layer by layer from the embedding to the head.

    Args:
        family: Facts of the architecture.
        sizes: Sizes of the base model.
        specs: Result of `build_specs`.
        prefix: What stands before the base model's names on disk, `model.` or nothing.
        head: Name of the head on disk.
        biased: Names on disk of the modules that have a bias.

    Yields:
        The new tensors.
    """
    for name, spec in specs["model"].items():
        if spec["kind"] == "embedding":
            yield from _module_tensors(prefix + name, spec, None, biased, sizes.vocabulary)
    for layer in specs["expanded_layers"]:
        for name, spec in specs["expanded"].items():
            path = f"{prefix}{family.layers}.{layer}.{name}"
            if spec["kind"] == "linear":
                yield from _linear_tensors(specs, name, path, layer, biased)
            elif spec["kind"] == "norm":
                yield from _module_tensors(path, spec, layer, biased)
    for name, spec in specs["model"].items():
        if spec["kind"] == "norm":
            yield from _module_tensors(prefix + name, spec, None, biased)
    if specs["head"]:
        yield from _module_tensors(head, specs["head"], None, biased, sizes.vocabulary)


def _module_tensors(
    path: str, spec: Spec, layer: int | None, biased: frozenset[str], rows: int | None = None
) -> Iterator[NewTensor]:
    shape = (spec["up"],) if rows is None else (rows, spec["up"])
    yield NewTensor(f"{path}.up_weight", shape, "up_weight", spec["kind"], layer, f"{path}.weight")
    if spec["kind"] == "norm" and path in biased:
        yield NewTensor(f"{path}.up_bias", (spec["up"],), "up_bias", "norm", layer, f"{path}.bias")


def _linear_tensors(specs: Spec, name: str, path: str, layer: int, biased: frozenset[str]) -> Iterator[NewTensor]:
    spec = specs["expanded"][name]
    collaborative = specs["collaborative"]
    has_w12 = layer in collaborative["layers"] and spec["group"] in collaborative["groups"]
    base_in, up_in = spec["in_features"]
    base_out, up_out = (sum(widths) for widths in zip(*spec["out_features"], strict=True))
    shapes = {
        "w12": (base_out, up_in if has_w12 else 0),
        "w21": (up_out, base_in),
        "w22": (up_out, up_in),
        "up_bias": (up_out if path in biased else 0,),
    }
    for block, shape in shapes.items():
        if 0 not in shape:
            yield NewTensor(f"{path}.{block}", shape, block, "linear", layer, f"{path}.weight")
