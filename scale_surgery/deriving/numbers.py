"""The same facts with the numbers of another model: names and roles come from a twin, sizes from the real model."""

from __future__ import annotations

import re
from dataclasses import replace

from torch import nn

from scale_surgery.deriving.part import features
from scale_surgery.planning.architecture import Block, Kind, Linear

HEAD_SIZE = re.compile(r"^(attention_)?head_?(dim|size)$|^d_head$|^kv_channels$|^dim_head$")


def number_kind(kind: Kind, layer: nn.Module, heads: int) -> Kind:
    """Give a kind the numbers of a layer."""
    return replace(kind, blocks=tuple(_number_block(block, layer, heads) for block in kind.blocks))


def _number_block(block: Block, layer: nn.Module, heads: int) -> Block:
    if block.treatment != "split":
        return replace(block, linears=tuple(_plain(linear, layer) for linear in block.linears))
    if block.group == "attn":
        return _number_attention(block, layer, heads)
    linears = tuple(_equal_shares(linear, layer) for linear in block.linears)
    return replace(block, linears=linears, inner=linears[-1].inputs)


def _plain(linear: Linear, layer: nn.Module) -> Linear:
    inputs, outputs = features(layer.get_submodule(linear.name))
    return replace(linear, inputs=inputs, outputs=(outputs,))


def _equal_shares(linear: Linear, layer: nn.Module) -> Linear:
    inputs, outputs = features(layer.get_submodule(linear.name))
    return replace(linear, inputs=inputs, outputs=(outputs // len(linear.roles),) * len(linear.roles))


def _number_attention(block: Block, layer: nn.Module, heads: int) -> Block:
    *readers, writer = block.linears
    query_width = features(layer.get_submodule(writer.name))[0]
    size = head_size(layer.get_submodule(block.name), query_width) or query_width // max(1, heads)
    width = next(
        (features(layer.get_submodule(reader.name))[1] - query_width * reader.roles.count("q")) // _shared(reader)
        for reader in readers
        if _shared(reader)
    )
    linears = tuple(_by_role(reader, layer, query_width, width) for reader in readers)
    return replace(
        block,
        linears=(*linears, _plain(writer, layer)),
        query_heads=query_width // size,
        key_value_heads=width // size,
        head_size=size,
    )


def _shared(linear: Linear) -> int:
    return sum(role in ("k", "v") for role in linear.roles)


def _by_role(linear: Linear, layer: nn.Module, query: int, key_value: int) -> Linear:
    inputs, _ = features(layer.get_submodule(linear.name))
    return replace(linear, inputs=inputs, outputs=tuple(query if role == "q" else key_value for role in linear.roles))


def head_size(module: nn.Module, width: int) -> int | None:
    """What an attention module says of the size of its heads; None where it says nothing that divides its width."""
    sizes = (value for name, value in vars(module).items() if HEAD_SIZE.search(name) and type(value) is int)
    return next((value for value in sizes if value > 0 and width % value == 0), None)
