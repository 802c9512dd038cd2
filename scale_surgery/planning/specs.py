"""From facts about an architecture to module specifications: which stock modules are expanded, and how wide.

The result stands under the key `scale_surgery` of config.json, which the exported modeling code executes; `tensors`
lists the tensors that belong to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from scale_surgery.checkpoint.expansions import DEFAULT_NAME
from scale_surgery.planning.architecture import Architecture, Block, Kind, Linear, Norm, Sizes, Stream

FORMAT = 2
# blocks that replace base tensors
REPLACING = ("w11", "bias11")
Spec = dict[str, Any]


@dataclass(frozen=True)
class Widths:
    """Added sizes: features of the residual stream, key/value heads, features inside the MLP, and tokens."""

    up_width: int = 0
    up_kv_heads: int = 0
    up_inner_width: int = 0
    new_tokens: int = 0

    @property
    def description(self) -> str:
        """The widths in one line."""
        return f"residual stream {self.up_width}, key/value heads {self.up_kv_heads}, inner {self.up_inner_width}"

    def up_streams(self, block: Block) -> dict[Stream, int]:
        """Up width of each stream of a block, in features."""
        features = self.up_kv_heads * block.head_size
        return {
            "residual": self.up_width,
            "query": features * block.queries_per_key_value,
            "key_value": features,
            "inner": self.up_inner_width,
            "private": 0,
        }


@dataclass(frozen=True)
class Collaboration:
    """Layers with a trainable W12, and groups of linears in them."""

    layers: tuple[int, ...] = ()
    groups: tuple[str, ...] = ()


@dataclass(frozen=True)
class LinearWidths:
    """Base and up width of a linear's input, and of its output for each role."""

    inputs: list[int]
    outputs: list[list[int]]

    @property
    def is_wider(self) -> bool:
        """True if it reads or writes new features."""
        return bool(self.inputs[1] or any(up for _, up in self.outputs))


def linear_widths(block: Block, linear: Linear, widths: Widths) -> LinearWidths:
    """How wide a linear becomes."""
    up = widths.up_streams(block)
    outputs = [[size, up[stream]] for size, stream in zip(linear.outputs, linear.writes(), strict=True)]
    return LinearWidths([linear.inputs, up[linear.reads]], outputs)


def build_specs(
    architecture: Architecture,
    sizes: Sizes,
    widths: Widths,
    layers: tuple[int, ...],
    collaboration: Collaboration,
    name: str = DEFAULT_NAME,
) -> Spec:
    """Say for every stock module whether and how it is expanded."""
    kinds, kind_of_layer = _layer_kinds(architecture, sizes, widths, layers, collaboration)
    several = {"kinds": kinds, "kind_of_layer": kind_of_layer}
    return {
        "format": FORMAT,
        "name": name,
        "base_model": architecture.base_model,
        "layers": architecture.layers,
        "expanded_layers": list(layers),
        "widths": asdict(widths),
        "collaborative": {"layers": list(collaboration.layers), "groups": list(collaboration.groups)},
        "model": _model_specs(architecture, sizes, widths, is_embedding_widened=0 in layers),
        "head": _head_spec(sizes, widths),
        **(kinds[0] if len(kinds) == 1 else several),
        **({"enter": "hook"} if architecture.enters == "hook" and widths.up_width else {}),
    }


def _layer_kinds(
    architecture: Architecture, sizes: Sizes, widths: Widths, layers: tuple[int, ...], collaboration: Collaboration
) -> tuple[list[Spec], list[int]]:
    """Specifications of each kind of layer, with and without W12, and for each layer the number of its own."""
    w12 = dict.fromkeys(layers, ()) | dict.fromkeys(collaboration.layers, collaboration.groups)
    # a layer that is not expanded shares the entry of any other of its kind
    keys = [(number, w12.get(layer, collaboration.groups)) for layer, number in enumerate(architecture.kind_of_layer)]
    entries: list[tuple[int, Spec]] = []
    places: dict[tuple[int, tuple[str, ...]], int] = {}
    for number, groups in sorted(set(keys)):
        entry = number, _kind_specs(architecture.kinds[number], sizes, widths, groups)
        entries += [entry] * (entry not in entries)
        places[number, groups] = entries.index(entry)
    return [specs for _, specs in entries], [places[key] for key in keys]


def specs_of_layer(specs: Mapping[str, Any], layer: int) -> Mapping[str, Any]:
    """The specifications of one layer: "expanded", "passing" and "attention"."""
    of_layer: Mapping[str, Any] = specs["kinds"][specs["kind_of_layer"][layer]] if "kinds" in specs else specs
    return of_layer


def _norm_spec(norm: Norm, sizes: Sizes, base: int, up: int) -> Spec:
    return {"kind": "norm", "base": base, "up": up, "style": norm.style, "epsilon": sizes.epsilon}


def _head_spec(sizes: Sizes, widths: Widths) -> Spec:
    new = {"new_tokens": widths.new_tokens, "is_tied": sizes.is_tied} if widths.new_tokens else {}
    return {"kind": "head", "base": sizes.hidden, "up": widths.up_width, **new} if widths.up_width or new else {}


def _model_specs(architecture: Architecture, sizes: Sizes, widths: Widths, *, is_embedding_widened: bool) -> Spec:
    specs = _up_specs(architecture, sizes, widths.up_width, is_embedding_widened=is_embedding_widened)
    if not widths.new_tokens:
        return specs
    embedding = specs.get(architecture.embedding, {"kind": "padding", "up": 0})
    return specs | {architecture.embedding: {**embedding, "base": sizes.hidden, "new_tokens": widths.new_tokens}}


def _up_specs(architecture: Architecture, sizes: Sizes, up: int, *, is_embedding_widened: bool) -> Spec:
    if not up:
        return {}
    final = architecture.final_norm
    last = {final.name: _norm_spec(final, sizes, sizes.hidden, up)}
    if architecture.enters == "hook":
        return last
    specs: Spec = {architecture.embedding: {"kind": "padding", "up": up}}
    specs |= {norm.name: {"kind": "passing", "base": sizes.hidden, "up": up} for norm in architecture.first_norms}
    if is_embedding_widened:
        specs[architecture.embedding] = {"kind": "embedding", "up": up}
        specs |= {norm.name: _norm_spec(norm, sizes, sizes.hidden, up) for norm in architecture.first_norms}
    return specs | last | {name: {"kind": "padding", "up": up} for name in architecture.padded}


def _kind_specs(kind: Kind, sizes: Sizes, widths: Widths, groups: tuple[str, ...]) -> Spec:
    blocks = [_block_specs(block, sizes, widths) for block in kind.blocks]
    modules = {name: spec for block in blocks for name, spec in block.items()}
    expanded: Spec = {name: spec for name, spec in modules.items() if spec["kind"] in ("linear", "block")}
    if widths.up_width:
        norms = (*kind.pre_norms, *kind.post_norms)
        expanded |= {norm.name: _norm_spec(norm, sizes, sizes.hidden, widths.up_width) for norm in norms}
    expanded |= {name: spec for name, spec in modules.items() if name not in expanded}
    if widths.up_width:
        idle = _unread(kind, sizes, widths, groups)
        # after blocks that run as they are without an MLP beside them the up part is zero
        for name in [] if widths.up_inner_width else _norms_after_whole(kind):
            idle[name] = {"kind": "passing", "base": sizes.hidden, "up": widths.up_width}
        expanded = {name: spec for name, spec in (expanded | idle).items() if spec}
    heads = [block for block in kind.blocks if block.query_heads] if widths.up_kv_heads else []
    attention = {block.name: _attention_spec(block, widths) for block in heads}
    return {
        "expanded": expanded,
        "passing": _passing_specs(kind, sizes.hidden, widths.up_width),
        "attention": attention,
    }


def _unread(kind: Kind, sizes: Sizes, widths: Widths, groups: tuple[str, ...]) -> Spec:
    """Norms whose up part nothing would read, and their linears: these read the base stream alone."""
    specs: Spec = {}
    for norm in kind.pre_norms:
        readers = [block for block in kind.blocks if block.norm == norm.name]
        if readers and not any(_reads_up(block, widths, has_w12=block.group in groups) for block in readers):
            specs[norm.name] = {"kind": "passing", "base": sizes.hidden, "up": 0}
            linears = (linear for block in readers for linear in block.linears)
            specs |= {linear.name: {} for linear in linears if linear.reads == "residual"}
    return specs


def _reads_up(block: Block, widths: Widths, *, has_w12: bool) -> bool:
    """Return True if a block reads the up stream: by W12 of its edges, or for new heads or inner features."""
    if block.is_whole:
        return bool(widths.up_inner_width)
    linears = [linear_widths(block, linear, widths) for linear in block.linears if linear.reads == "residual"]
    return has_w12 or any(up for linear in linears for _, up in linear.outputs)


def _norms_after_whole(kind: Kind) -> list[str]:
    """Norms after blocks that run as they are; none where norms and blocks are no pairs."""
    if len(kind.post_norms) != len(kind.blocks):
        return []
    pairs = zip(kind.post_norms, kind.blocks, strict=True)
    return [norm.name for norm, block in pairs if block.is_whole]


def _block_specs(block: Block, sizes: Sizes, widths: Widths) -> Spec:
    up = widths.up_streams(block)
    if block.is_whole:
        if not widths.up_width:
            return {}
        sides = {"base": sizes.hidden, "up": widths.up_width, "inner": widths.up_inner_width}
        return {block.name: {"kind": "block", **sides, "group": block.group}}
    specs: Spec = {}
    for linear in block.linears:
        wide = linear_widths(block, linear, widths)
        if wide.is_wider:
            # rows in order of heads: new heads come after all old ones
            is_mixed = linear.fused_by == "head"
            outputs = [[sum(sizes) for sizes in zip(*wide.outputs, strict=True)]] if is_mixed else wide.outputs
            features = {"in_features": wide.inputs, "out_features": outputs}
            specs[linear.name] = {"kind": "linear", "group": block.group, **features}
    specs |= _inner_norm_specs(block, sizes, up)
    return specs | ({name: {"kind": "activation", "base": block.inner} for name in block.activations if up["inner"]})


def _inner_norm_specs(block: Block, sizes: Sizes, up: Mapping[Stream, int]) -> Spec:
    specs: Spec = {}
    for norm in block.inner_norms:
        if up[norm.stream] and norm.head_axis is None:
            whole = Norm(norm.name, norm.style)
            specs[norm.name] = _norm_spec(whole, sizes, block.heads_through(norm) * block.head_size, up[norm.stream])
        elif up[norm.stream]:
            specs[norm.name] = {"kind": "head_norm", "heads": block.heads_through(norm), "axis": norm.head_axis}
    return specs


def _passing_specs(kind: Kind, base: int, up: int) -> Spec:
    """A layer that is not expanded: its readers see the base stream, its writers add zeros to the up stream."""
    if not up:
        return {}
    reading = [linear.name for linear in kind.linears if linear.reads == "residual"]
    writing = [linear.name for linear in kind.linears if "residual" in linear.writes()]
    readers = ([norm.name for norm in kind.pre_norms] or reading) + list(kind.direct)
    writers = [norm.name for norm in kind.post_norms] or writing
    specs = {name: {"kind": "passing", "base": base, "up": 0} for name in readers}
    specs |= {name: {"kind": "passing", "base": None, "up": up} for name in writers}
    # a block that runs as it is drops the up stream itself, and a norm after it reads zeros there
    whole = [block.name for block in kind.blocks if block.is_whole]
    specs |= {name: {"kind": "passing", "base": base, "up": up} for name in _norms_after_whole(kind)}
    return specs | {name: {"kind": "block", "base": base, "up": up} for name in whole}


def _attention_spec(block: Block, widths: Widths) -> Spec:
    heads = {"heads": block.query_heads, "kv_heads": block.key_value_heads}
    added = widths.up_kv_heads * block.queries_per_key_value
    return heads | attention_values(block, block.query_heads + added)


def attention_values(block: Block, query_heads: int) -> Spec:
    """Attributes and config values that a stock attention has to read with so many query heads."""
    values = {
        "query_heads": query_heads,
        "key_value_heads": query_heads // block.queries_per_key_value,
        "query_features": query_heads * block.head_size,
    }
    return {
        "attributes": {key: values[name] for key, name in block.attributes.items()},
        "config": {key: values[name] for key, name in block.config.items()},
    }
