"""Attention of an expanded layer: old and new heads attend one after the other, inside the stock forward.

The old heads get the shapes, the strides and the alignment that they have in the base model, so their results are
the base model's, bit for bit. This file travels with the checkpoint.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .expanded_modules import View
from .expanded_streams import CACHE_LINE


class Part(NamedTuple):
    """Heads that attend by themselves: how many, if the base has them, if gradients stop there, and whose they are."""

    heads: int
    kv_heads: int
    is_old: bool
    is_detached: bool = False
    owner: str = ""


def own_heads(states: Tensor, sizes: list[int], parts: tuple[Part, ...], is_eager: bool) -> list[Tensor]:
    """Split queries, keys or values (b, heads, t, head size) into parts of so many heads.

    Old heads get the strides and the alignment that they have in the base model, because matrix kernels
    choose their path by both. In a cache, where each head lies by itself, nothing needs to be copied for the
    usual head sizes, except for eager attention, whose batched product would copy them into another order.
    """
    batch, _, rows, size = states.shape
    _, head_stride, row_stride, _ = states.stride()
    is_transposed = row_stride > head_stride
    is_unaligned = is_eager or head_stride * states.element_size() % CACHE_LINE
    found = []
    for index, (part, own) in enumerate(zip(parts, states.split(sizes, dim=1), strict=True)):
        own = own.detach() if part.is_detached else own
        if part.is_old and is_transposed:
            # a head may be part of a fused projection, at some distance from its start; a graph cannot hold that number
            start = 0 if torch.compiler.is_compiling() else states.storage_offset() % head_stride
            beside = states.new_empty(batch, rows, sizes[index], head_stride)
            own = beside[..., start : start + size].transpose(1, 2).copy_(own)
        # new heads are aligned the same on one path and on two; a copy of them is what backward keeps
        elif is_transposed or (is_unaligned and (batch > 1 or index)) or (own.requires_grad and not part.is_old):
            own = own.clone()
        found.append(own)
    return found


def joined_parts(parts: tuple[Part, ...], states: Tensor, name: str) -> tuple[Part, ...]:
    """Parts as they attend together: on one thread of a CPU all heads do, where that is a token at a time.

    There the kernel takes a query of one row head by head, and its bits do not depend on how many there are if each
    begins at a cache line; on several threads they show which of them took it. A call costs more than it computes.
    """
    is_apart = name != "sdpa" or states.device.type != "cpu" or states.shape[-2] > 1 or torch.compiler.is_compiling()
    is_apart = is_apart or states.shape[-1] * states.element_size() % CACHE_LINE or torch.get_num_threads() > 1
    if is_apart or len({own.is_detached for own in parts}) > 1:
        return parts
    heads, kv_heads = sum(own.heads for own in parts), sum(own.kv_heads for own in parts)
    return (Part(heads, kv_heads, is_old=False, is_detached=parts[0].is_detached),)


def split_attention(module, query, key, value, attention_mask, **kwargs):
    """Attention of each part of the heads, one after the other, by the kernel that the model's config names."""
    config = module.config.viewed
    name = config._attn_implementation
    run = module.eager_attention if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
    seen = View(module, {"config": config})
    parts = module.parts
    if module.base_detached and torch.is_grad_enabled():
        parts = tuple(part._replace(is_detached=part.is_detached or part.is_old) for part in parts)
    parts = joined_parts(parts, query, name)
    heads, kv_heads = [part.heads for part in parts], [part.kv_heads for part in parts]
    states = [
        own_heads(own, sizes, parts, name == "eager")
        for own, sizes in ((query, heads), (key, kv_heads), (value, kv_heads))
    ]
    outputs = [run(seen, *own, attention_mask, **kwargs) for own in zip(*states, strict=True)]
    attended, weights = zip(*outputs, strict=True)
    joined = attended[0] if len(attended) == 1 else torch.cat(attended, dim=2)
    return joined, None if weights[0] is None else torch.cat(weights, dim=1)


SPLIT_ATTENTION = "scale_surgery_split_heads"
ALL_ATTENTION_FUNCTIONS.register(SPLIT_ATTENTION, split_attention)


def find_eager_attention(module: nn.Module) -> Any:
    """The eager attention function of a module's file; each file of transformers has one of its own.

    Raises:
        ValueError: If there is none: older releases compute the attention of some models inside the module.
    """
    found = vars(import_module(type(module).__module__)).get("eager_attention_forward")
    if found is None:
        raise ValueError(
            f"config.json: scale_surgery adds heads to {type(module).__name__}, which in transformers "
            f"{transformers.__version__} does not hand queries, keys and values to a function of attention, expected "
            "one that does. Load the model with the release that surgery.json names."
        )
    return found


def expand_attention(module: nn.Module, mode: str, parts: list[Part], attributes: dict, config: dict) -> None:
    """Tell an attention module of its heads in a mode: what its stock forward then reads from itself and its config.

    Args:
        module: The attention module.
        mode: "expanded", one path, or "routed", two.
        parts: Its heads, in the order in which they lie; none where all of them attend at once.
        attributes: Values of the module's attributes.
        config: Values of its config.
    """
    if not hasattr(module, "modes"):
        module.base_detached = False
        module.eager_attention = find_eager_attention(module)
        module.modes = {"stock": {"config": module.config}}
    module.modes["stock"] |= {name: getattr(module, name) for name in attributes}
    split = {"_attn_implementation": SPLIT_ATTENTION} if parts else {}
    own_config = View(module.modes["stock"]["config"], config | split)
    module.modes[mode] = {"config": own_config, "parts": tuple(parts)} | attributes


def switch_attention(module: nn.Module, mode: str) -> None:
    """Let an attention module see the heads of a mode; the stock ones where it has none of its own in that mode."""
    for name, value in (module.modes["stock"] | module.modes.get(mode, {})).items():
        setattr(module, name, value)
