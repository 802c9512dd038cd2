"""Attention of an expanded layer: old and new heads attend one after the other, inside the stock forward.

The old heads get the shapes, the strides and the alignment that they have in the base model, so their results are
the base model's, bit for bit. This file travels with the checkpoint.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# bytes; kernels may treat rows that begin at a multiple of a vector register differently
ALIGNMENT = 64


class View:
    """An object seen with some values of its own; everything else is read live from the object."""

    def __init__(self, viewed: Any, own: dict[str, Any]) -> None:
        self.__dict__.update(own, viewed=viewed)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "viewed":
            raise AttributeError(name)
        return getattr(self.viewed, name)


def own_heads(states: Tensor, heads: int, is_eager: bool, is_detached: bool) -> tuple[Tensor, Tensor]:
    """Split queries, keys or values (b, heads, t, head size) into old and new heads.

    The old heads get the strides and the alignment that they have in the base model, because matrix kernels
    choose their path by both. In a cache, where each head lies by itself, nothing needs to be copied for the
    usual head sizes, except for eager attention, whose batched product would copy them into another order.
    """
    old, new = states[:, :heads], states[:, heads:]
    old = old.detach() if is_detached else old
    batch, _, rows, size = states.shape
    _, head_stride, row_stride, _ = states.stride()
    is_transposed = row_stride > head_stride
    if is_transposed:
        # a head may be part of a fused projection, at some distance from its start; a graph cannot hold that number
        start = 0 if torch.compiler.is_compiling() else states.storage_offset() % head_stride
        beside = states.new_empty(batch, rows, heads, head_stride)
        old = beside[..., start : start + size].transpose(1, 2).copy_(old)
    elif batch > 1 and (is_eager or head_stride * states.element_size() % ALIGNMENT):
        old = old.clone()
    # a copy of the new heads is what backward keeps, and not all heads
    return old, new.clone() if is_transposed or new.requires_grad else new


def split_attention(module, query, key, value, attention_mask, **kwargs):
    """Attention of old and new heads, one after the other, by the kernel that the model's config names."""
    config = module.config.viewed
    name = config._attn_implementation
    run = module.eager_attention if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
    seen = View(module, {"config": config})
    is_eager, is_detached = name == "eager", module.base_detached
    queries = own_heads(query, module.base_heads, is_eager, is_detached)
    keys = own_heads(key, module.base_kv_heads, is_eager, is_detached)
    values = own_heads(value, module.base_kv_heads, is_eager, is_detached)
    parts = [run(seen, *states, attention_mask, **kwargs) for states in zip(queries, keys, values, strict=True)]
    (old, old_weights), (new, new_weights) = parts
    weights = None if old_weights is None else torch.cat((old_weights, new_weights), dim=1)
    return torch.cat((old, new), dim=2), weights


SPLIT_ATTENTION = "scale_surgery_split_heads"
ALL_ATTENTION_FUNCTIONS.register(SPLIT_ATTENTION, split_attention)


def expand_attention(module: nn.Module, heads: int, kv_heads: int, attributes: dict, config: dict) -> None:
    """Tell an attention module of its new heads: what its stock forward reads from itself and from its config."""
    module.base_heads, module.base_kv_heads, module.base_detached = heads, kv_heads, False
    module.eager_attention = vars(import_module(type(module).__module__))["eager_attention_forward"]
    own_config = View(module.config, {**config, "_attn_implementation": SPLIT_ATTENTION})
    module.stock_values = {"config": module.config} | {name: getattr(module, name) for name in attributes}
    module.expanded_values = {"config": own_config} | attributes
    switch_attention(module, is_enabled=True)


def switch_attention(module: nn.Module, *, is_enabled: bool) -> None:
    """Let an attention module see its new heads, or not."""
    for name, value in (module.expanded_values if is_enabled else module.stock_values).items():
        setattr(module, name, value)
