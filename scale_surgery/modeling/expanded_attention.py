"""Attention of an expanded model: the heads of each path attend by themselves, inside the stock forward.

The base's heads get the shapes, the strides and the alignment that they have in the base model, so their results are
the base model's, bit for bit. The stock forward runs on a copy of its module that sees as many heads as there are;
nothing of the module itself changes.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .expanded_modules import twin
from .expanded_paths import Paths, Running, memo
from .expanded_stock import View
from .expanded_streams import CACHE_LINE


class HeadPart(NamedTuple):
    """Heads that attend together, and with no others."""

    heads: int  # how many heads of queries
    kv_heads: int  # how many of keys and values
    is_base: bool  # whether the base has them
    is_detached: bool = False  # whether gradients stop there: nothing that trains reaches the base stream


class Heads(NamedTuple):
    """Heads that an expansion adds to a layer."""

    heads: int
    kv_heads: int


def split_heads(states: Tensor, sizes: list[int], parts: tuple[HeadPart, ...], is_eager: bool) -> list[Tensor]:
    """Split queries, keys or values (b, heads, t, head size) into parts of so many heads.

    Heads of the base get the strides and the alignment that they have in the base model, because matrix kernels
    choose their path by both. In a cache, where each head lies by itself, nothing needs to be copied for the
    usual head sizes, except for eager attention, whose batched product would copy them into another order.
    """
    batch, _, rows, size = states.shape
    _, head_stride, row_stride, _ = states.stride()
    is_transposed = row_stride > head_stride
    is_unaligned = is_eager or head_stride * states.element_size() % CACHE_LINE
    heads = []
    for index, (part, piece) in enumerate(zip(parts, states.split(sizes, dim=1), strict=True)):
        piece = piece.detach() if part.is_detached else piece
        if part.is_base and is_transposed:
            # a head may be part of a fused projection, at some distance from its start; a graph cannot hold that number
            start = 0 if torch.compiler.is_compiling() else states.storage_offset() % head_stride
            beside = states.new_empty(batch, rows, sizes[index], head_stride)
            piece = beside[..., start : start + size].transpose(1, 2).copy_(piece)
        # heads of an expansion are aligned alike on one path and on two; where they train, backward stores this copy
        elif is_transposed or (is_unaligned and (batch > 1 or index)) or (piece.requires_grad and not part.is_base):
            piece = piece.clone()
        heads.append(piece)
    return heads


def joined_parts(parts: tuple[HeadPart, ...], states: Tensor, name: str) -> tuple[HeadPart, ...]:
    """Parts to attend by: a single one of all heads for one token on one thread of a CPU, otherwise those given.

    There the kernel takes a query of one row head by head, and its bits do not depend on how many there are if each
    begins at a cache line; on several threads they depend on the thread. A call costs more than it computes.
    """
    is_apart = name != "sdpa" or states.device.type != "cpu" or states.shape[-2] > 1 or torch.compiler.is_compiling()
    is_apart = is_apart or states.shape[-1] * states.element_size() % CACHE_LINE or torch.get_num_threads() > 1
    if is_apart:
        return parts
    return (HeadPart(sum(part.heads for part in parts), sum(part.kv_heads for part in parts), is_base=False),)


def split_attention(module, query, key, value, attention_mask, **kwargs):
    """Attention of each part of the heads, one after the other, by the kernel that the model's config names."""
    stock = module.stock
    name = stock.config._attn_implementation
    run = stock.eager_attention if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
    parts = module.parts
    if not torch.is_grad_enabled():
        parts = joined_parts(tuple(part._replace(is_detached=False) for part in parts), query, name)
    heads, kv_heads = [part.heads for part in parts], [part.kv_heads for part in parts]
    states = [
        split_heads(tensor, sizes, parts, name == "eager")
        for tensor, sizes in ((query, heads), (key, kv_heads), (value, kv_heads))
    ]
    outputs = [run(stock, *part_states, attention_mask, **kwargs) for part_states in zip(*states, strict=True)]
    attended, weights = zip(*outputs, strict=True)
    joined = attended[0] if len(attended) == 1 else torch.cat(attended, dim=2)
    return joined, None if weights[0] is None else torch.cat(weights, dim=1)


SPLIT_ATTENTION = "scale_surgery_heads_of_paths"
ALL_ATTENTION_FUNCTIONS.register(SPLIT_ATTENTION, split_attention)


class ExpandedAttention:
    """Attention of a layer; its stock forward sees the heads of all chosen paths. `expand_attention` sets it up."""

    running: Running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        parts = memo(self.parts_of, self.running.now().paths, self.make_parts)
        if parts is None:
            return super().forward(*args, **kwargs)
        return type(self).__bases__[1].forward(self.widened(parts), *args, **kwargs)

    def make_parts(self, paths: Paths) -> tuple[HeadPart, ...] | None:
        """The heads of these paths, in the order in which they lie."""
        parts = []
        for group in paths.groups(self.place):
            parts.append(HeadPart(*self.stock_heads, is_base=True, is_detached=group.is_fixed))
            parts += [HeadPart(*self.new_heads[name], is_base=False) for name in group.ups if name in self.new_heads]
        return None if len(parts) == 1 else tuple(parts)

    def widened(self, parts: tuple[HeadPart, ...]) -> nn.Module:
        """A copy of this module for its stock forward: the same tensors and modules, and the heads of all parts."""
        heads = sum(part.heads for part in parts)
        config = {name: getattr(self.config, name) * heads // self.stock_heads.heads for name in self.config_values}
        values = {name: getattr(self, name) * heads // self.stock_heads.heads for name in self.attributes}
        config["_attn_implementation"] = SPLIT_ATTENTION
        return twin(self, **values, parts=parts, stock=self, config=View(self.config, config))


def find_eager_attention(module: nn.Module) -> Any:
    """The eager attention function of a module's file; each file of transformers has one of its own.

    Raises:
        ValueError: If there is none: older releases compute the attention of some models inside the module.
    """
    function = vars(import_module(type(module).__module__)).get("eager_attention_forward")
    if function is None:
        raise ValueError(
            f"config.json: scale_surgery adds heads to {type(module).__name__}, which in transformers "
            f"{transformers.__version__} does not hand queries, keys and values to a function of attention, expected "
            "one that does. Load the model with the release that surgery.json names."
        )
    return function


@cache
def expanded_attention_class(stock: type) -> type:
    """The class of an attention module that sees the heads of all paths."""
    return type(f"{stock.__name__}WithHeads", (ExpandedAttention, stock), {"__module__": __name__})


def expand_attention(module: nn.Module, facts: dict[str, Any], running: Running, place: int) -> None:
    """Let the heads of all paths attend in a stock module of attention, in place.

    Args:
        module: The attention module.
        facts: `heads`, `kv_heads`, and `attributes` and `config`, whose keys name what says how many there are.
        running: What the model runs.
        place: Number of its layer.
    """
    if isinstance(module, ExpandedAttention):
        return
    module.eager_attention = find_eager_attention(module)
    module.__class__ = expanded_attention_class(type(module))
    module.running, module.place = running, place
    module.parts_of = {}  # parts of the heads by the paths; None where all heads are the base's
    module.stock_heads, module.new_heads = Heads(facts["heads"], facts["kv_heads"]), {}  # new ones by expansion
    # names of attributes, and of values of its config, that say how many heads there are or how wide all are
    module.attributes, module.config_values = tuple(facts["attributes"]), tuple(facts["config"])
