"""Attention whose heads can be widened: its conditions, and which linear makes queries, keys and values."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from scale_surgery.deriving.norms import is_norm, norm_style
from scale_surgery.deriving.part import Change, LayerPart, SplitError, features
from scale_surgery.deriving.watch import Attention, ModuleCall, depends
from scale_surgery.planning.architecture import Block, HeadSize, InnerNorm, Linear, Role

# attributes of attention that hold a number of heads or of features of all heads, and those that do not
COUNTS = re.compile(r"head|split|embed|hidden|size")
NOUNS: Mapping[Role, str] = {"k": "keys", "v": "values"}
NO_COUNTS = re.compile(r"head_dim|head_size|groups|layer_idx|window")


@dataclass(frozen=True)
class HeadCounts:
    """Numbers of heads and of their features."""

    query: int
    key_value: int
    size: int

    @property
    def named(self) -> dict[HeadSize, int]:
        """Numbers that attention may read from its attributes or config."""
        return {
            "query_heads": self.query,
            "query_features": self.query * self.size,
            "key_value_heads": self.key_value,
        }

    def width(self, role: Role) -> int:
        """Features that a linear gives for a role."""
        return (self.query if role == "q" else self.key_value) * self.size


def describe_attention(part: LayerPart, block: Block) -> Block:
    """Split attention, with its roles and sizes; raises SplitError where its heads cannot be widened."""
    attention, writer = _only_attention(part), part.writer
    assert writer is not None
    if part.inner_linears:
        raise SplitError(_between(part, attention))
    heads = _heads(attention, writer)
    readers = tuple(_reader(part, call, attention, heads) for call in part.readers)
    _check_roles(readers)
    linears = (*readers, Linear(writer.name, ("o",), features(writer.module)[0], (part.hidden,)))
    norms = tuple(_inner_norm(call, attention, heads) for call in part.leaves)
    if all(norm.head_axis is not None for norm in norms):
        _check_alike(part, readers, heads)
    return replace(
        block,
        treatment="split",
        reason="",
        linears=linears,
        inner_norms=norms,
        query_heads=heads.query,
        key_value_heads=heads.key_value,
        head_size=heads.size,
        attributes=_attributes(part.module, heads),
        config=_config_keys(part.module, heads),
    )


def _only_attention(part: LayerPart) -> Attention:
    if not part.attentions:
        raise SplitError("it does not hand queries, keys and values to transformers' attention interface")
    if len(part.attentions) > 1:
        raise SplitError(f"it runs attention {len(part.attentions)} times")
    attention = part.attentions[0]
    if part.uncalled_parameters:
        raise SplitError(f"it has parameters of its own: {', '.join(part.uncalled_parameters)}")
    if attention.extras:
        raise SplitError(f"its attention takes more than queries, keys and values: {', '.join(attention.extras)}")
    if any(states.dim() != 4 for states in (attention.query, attention.key, attention.value)):
        raise SplitError("its queries are not (batch, heads, tokens, features)")
    return attention


def _heads(attention: Attention, writer: ModuleCall) -> HeadCounts:
    query, key, value = (tuple(states.shape) for states in (attention.query, attention.key, attention.value))
    if not query[-1] == key[-1] == value[-1]:
        raise SplitError(f"heads of queries and of values differ in size: {query[-1]} and {value[-1]}")
    if key[1] != value[1] or query[1] % key[1]:
        raise SplitError(f"{query[1]} query heads share {key[1]} heads of keys and {value[1]} of values")
    if features(writer.module)[0] != query[1] * query[-1]:
        raise SplitError(f"{writer.name} reads another number of features than the heads give")
    return HeadCounts(query[1], key[1], query[-1])


def _between(part: LayerPart, attention: Attention) -> str:
    """Say which linear stands between the readers and attention."""
    names = [linear.name for linear in part.inner_linears]
    for linear in part.inner_linears:
        assert linear.gave is not None
        if any(
            linear.gave.requires_grad and depends(made, linear.gave)[0] is not None
            for made in (attention.key, attention.value)
        ):
            return f"keys and values are made from a latent: {linear.name} reads what another linear wrote"
    return f"between the linears that read and write the residual stream there are others: {', '.join(names)}"


def _reader(part: LayerPart, reader: ModuleCall, attention: Attention, heads: HeadCounts) -> Linear:
    """A linear that reads the residual stream: its roles, and how they share its rows."""
    assert reader.gave is not None
    inputs, width = features(reader.module)
    made: Mapping[Role, Tensor] = {"q": attention.query, "k": attention.key, "v": attention.value}
    mask_of = {role: mask for role, states in made.items() if (mask := depends(states, reader.gave)[0]) is not None}
    masks = list(mask_of.values())
    if any(bool((a & b).any()) for i, a in enumerate(masks) for b in masks[:i]):
        raise SplitError(f"{reader.name} makes {' and '.join(mask_of)} from the same features")
    roles = sorted(mask_of, key=lambda role: int(mask_of[role].nonzero()[0]))
    fused: Literal["section", "head"] = "section" if all(map(_is_section, masks)) else "head"
    # remaining features gate the output of attention
    roles += ["q"] * ((width - sum(map(heads.width, roles))) // heads.width("q"))
    outputs = tuple(heads.width(role) for role in roles)
    if not roles or sum(outputs) != width:
        raise SplitError(
            f"{reader.name} gives {width} features, which is no number of heads of queries, keys and values"
        )
    return Linear(reader.name, tuple(roles), inputs, outputs, fused)


def _is_section(mask: Tensor) -> bool:
    places = mask.nonzero().flatten()
    return int(places[-1] - places[0]) + 1 == len(places)


def _check_roles(readers: tuple[Linear, ...]) -> None:
    made = [role for linear in readers for role in linear.roles]
    for role, noun in NOUNS.items():
        if made.count(role) != 1:
            raise SplitError(f"its {noun} do not come from one linear of this layer")
    if "q" not in made:
        raise SplitError("its queries do not come from a linear of this layer")


def _inner_norm(leaf: ModuleCall, attention: Attention, heads: HeadCounts) -> InnerNorm:
    """A norm on queries, keys or outputs of heads."""
    assert leaf.before is not None and leaf.gave is not None
    shape = tuple(leaf.before.shape)
    style = norm_style(leaf.module, shape[-1]) if is_norm(leaf.module) else None
    if style is None:
        raise SplitError(f"{leaf.name} ({type(leaf.module).__name__}) lies between its linears")
    reads_key = any(depends(states, leaf.gave)[0] is not None for states in (attention.key, attention.value))
    stream, count = ("key_value", heads.key_value) if reads_key else ("query", heads.query)
    if len(shape) == 4 and shape[-1] == heads.size and count in shape[1:3]:
        return InnerNorm(leaf.name, stream, -2 if shape[2] == count else 1, style)  # type: ignore[arg-type]
    if shape[-1] == count * heads.size:
        return InnerNorm(leaf.name, stream, None, style)  # type: ignore[arg-type]
    raise SplitError(f"{leaf.name} normalises {shape[-1]} features, which are neither a head nor all heads")


def _check_alike(part: LayerPart, readers: tuple[Linear, ...], heads: HeadCounts) -> None:
    """Heads in another order give the same in that order; otherwise they are not alike, as with slopes or sinks."""
    if part.call is None or heads.key_value == 1:
        return
    calls = {call.name: call.module for call in part.readers}
    changes = {calls[linear.name]: _rolled(linear, heads) for linear in readers}
    changed, stock = part.written(changes), part.writer
    assert stock is not None and stock.before is not None and changed is not None
    if not torch.allclose(changed, _roll(stock.before, heads), atol=1e-4, rtol=1e-4):
        raise SplitError("its heads are not alike: in another order they give something else")


def _rolled(linear: Linear, heads: HeadCounts) -> Change:
    def change(result: Tensor) -> Tensor:
        if linear.fused_by == "head":
            return _roll(result, heads)
        return torch.cat([_roll(section, heads) for section in torch.split(result, list(linear.outputs), -1)], -1)

    return change


def _roll(result: Tensor, heads: HeadCounts) -> Tensor:
    """The key/value heads, each with its queries, in another order."""
    groups = result.reshape(*result.shape[:-1], heads.key_value, -1)
    return groups.roll(1, -2).flatten(-2)


def _attributes(module: nn.Module, heads: HeadCounts) -> dict[str, HeadSize]:
    names = set(re.findall(r"self\.(\w+)\b(?!\()", _source(module)))
    values = {name: getattr(module, name, None) for name in sorted(names)}
    return {name: size for name, value in values.items() if (size := _size_named(name, value, heads))}


def _config_keys(module: nn.Module, heads: HeadCounts) -> dict[str, HeadSize]:
    config = getattr(module, "config", None)
    names = set(re.findall(r"self\.config\.(num_\w*heads)\b", _source(module)))
    return {name: size for name in sorted(names) if (size := _size_named(name, getattr(config, name, None), heads))}


def _size_named(name: str, value: object, heads: HeadCounts) -> HeadSize | None:
    if type(value) is not int or not COUNTS.search(name) or NO_COUNTS.search(name):
        return None
    names = [size for size, count in heads.named.items() if count == value]
    preferred = [size for size in names if size == "key_value_heads" and re.search("key_value|kv", name)]
    return next(iter(preferred + names), None)


def _source(module: nn.Module) -> str:
    """Source of a module's forward and of the methods of its class that it calls."""
    return "".join(_functions(type(module), "forward", set()))


def _functions(owner: type, name: str, seen: set[str]) -> Iterator[str]:
    function = getattr(owner, name, None)
    if name in seen or not inspect.isfunction(function):
        return
    seen.add(name)
    source = inspect.getsource(function)
    yield source
    for called in re.findall(r"self\.(\w+)\(", source):
        yield from _functions(owner, called, seen)
