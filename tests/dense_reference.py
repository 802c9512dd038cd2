"""A plain reference of an expanded model: dense block matrices and joint attention in float64, nothing detached.

Only the order of modules is the model's own. What each module computes is written here once more, in the simplest
way, on the joined streams; autograd then gives every block the gradient of its part of one dense matrix.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from scale_surgery.checkpoint.expansions import DEFAULT_NAME
from scale_surgery.modeling.expanded_blocks import (
    EmbeddingBlocks,
    HeadBlocks,
    LinearBlocks,
    NormBlocks,
    PassingBlocks,
    SameBlocks,
)
from scale_surgery.modeling.expanded_modules import ExpandedAttention, ExpandedModule, stock_class
from tests.families import FAMILIES

JOINT_ATTENTION = "joint_attention_of_a_test"


def joint_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **options: Any
) -> tuple[Tensor, None]:
    """Attention of all heads at once, as a textbook has it."""
    group = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(group, dim=1) for states in (key, value))
    scores, cap = query @ key.transpose(2, 3) * scaling, options.get("softcap")
    scores = scores if cap is None else cap * (scores / cap).tanh()
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    # the mask of eager attention is a number that is added; a padded row may see nothing, and must not become NaN
    seen = mask if mask.dtype == torch.bool else mask == 0
    weights = scores.masked_fill(~seen, -1e9).softmax(-1)
    return (weights @ value).transpose(1, 2), None


class SeenConfig:
    """A config that names the attention above, for whoever asks for its kernel."""

    _attn_implementation = JOINT_ATTENTION

    def __init__(self, config: Any) -> None:
        self.config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)


def block_matrix(module: Any, blocks: LinearBlocks) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of an expanded linear as one dense layer, rows in the order of its output sections."""
    weight = module.weight.T if type(module).__name__.startswith("Conv1D") else module.weight
    bases, ups = module.sections or (weight.shape[0],), blocks.up_sections
    base_out, up_out = sum(bases), sum(ups)
    up_in = next((block.shape[1] for block in (blocks.w12, blocks.w22) if block is not None), 0)
    w12 = weight.new_zeros(base_out, up_in) if blocks.w12 is None else blocks.w12
    w21 = weight.new_zeros(up_out, weight.shape[1]) if blocks.w21 is None else blocks.w21
    w22 = weight.new_zeros(up_out, up_in) if blocks.w22 is None else blocks.w22
    matrix = torch.cat((torch.cat((weight, w12), 1), torch.cat((w21, w22), 1)), 0)
    rows = section_order(list(zip(bases, ups, strict=True)), base_out)
    if module.bias is None:
        return matrix[rows], None
    up_bias = weight.new_zeros(up_out) if blocks.up_bias is None else blocks.up_bias
    return matrix[rows], torch.cat((module.bias, up_bias))[rows]


def section_order(sections: list[tuple[int, int]], base_out: int) -> list[int]:
    """Rows of the stacked matrix in the order of the output: first section's base rows, its up rows, and so on."""
    base, up, rows = 0, base_out, []
    for base_size, up_size in sections:
        rows += [*range(base, base + base_size), *range(up, up + up_size)]
        base, up = base + base_size, up + up_size
    return rows


def linear(module: Any, blocks: LinearBlocks, _: str, x: Tensor) -> Tensor:
    matrix, bias = block_matrix(module, blocks)
    # where nothing flows in from the up stream, the matrix has no columns for it
    return functional.linear(x[..., : matrix.shape[1]], matrix, bias)


def head(module: Any, blocks: HeadBlocks, _: str, x: Tensor) -> Tensor:
    weights = [weight for weight in (module.weight, blocks.up_weight) if weight is not None]
    return functional.linear(x, torch.cat(weights, 1), module.bias)


def embedding(module: Any, blocks: EmbeddingBlocks, _: str, ids: Tensor) -> Tensor:
    joined = functional.embedding(ids, torch.cat((module.weight, blocks.up_weight), 1), module.padding_idx)
    return joined * getattr(module, "embed_scale", 1.0)


def norm(module: Any, style: str, x: Tensor) -> Tensor:
    """One norm over the last axis, from its definition."""
    return normalised(x, module.weight, getattr(module, "bias", None), style, epsilon_of(module))


def split_norm(module: Any, blocks: NormBlocks, style: str, x: Tensor) -> Tensor:
    base, up = x.split([module.weight.shape[0], blocks.up_weight.shape[0]], dim=-1)
    up = normalised(up, blocks.up_weight, blocks.up_bias, style, epsilon_of(module))
    return torch.cat((norm(module, style, base), up), -1)


def normalised(x: Tensor, gain: Tensor, bias: Tensor | None, style: str, epsilon: float) -> Tensor:
    x = x - x.mean(-1, keepdim=True) if style == "layer" else x
    x = x / (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()
    x = x * (1 + gain if style == "rms_plus_one" else gain)
    return x if bias is None else x + bias


def epsilon_of(module: Any) -> float:
    return module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps


def same(module: Any, _: SameBlocks, style: str, x: Tensor) -> Tensor:
    """A norm inside each head, or an activation."""
    return norm(module, style, x) if is_norm(module) else stock_class(module).forward(module, x)


def passing(module: Any, blocks: PassingBlocks, style: str, x: Tensor) -> Tensor:
    """A module of a layer that was not chosen: reads the base stream alone, adds nothing to the up stream."""
    seen = x[..., : -blocks.up_in] if blocks.up_in else x
    y = norm(module, style, seen) if is_norm(module) else stock_class(module).forward(module, seen)
    return torch.cat((y, y.new_zeros(*y.shape[:-1], blocks.up_out)), -1)


def is_norm(module: Any) -> bool:
    return "Norm" in stock_class(module).__name__


FORWARDS: dict[type, Callable[..., Tensor]] = {
    LinearBlocks: linear,
    HeadBlocks: head,
    EmbeddingBlocks: embedding,
    NormBlocks: split_norm,
    SameBlocks: same,
    PassingBlocks: passing,
}


def joint(module: ExpandedAttention, parts: Any) -> Any:
    """What a stock forward of attention sees, whose heads attend at once."""
    attention = ExpandedAttention.widened(module, parts)
    attention.config = SeenConfig(attention.config)
    return attention


def dense_reference(model: Any, dtype: torch.dtype) -> Any:
    """A copy of a model that runs its one expansion, in which every module computes what is written above."""
    reference = copy.deepcopy(model).to(dtype)
    style = FAMILIES[model.config.model_type.removeprefix("scale_")].norm_style
    for module in list(reference.modules()):
        if isinstance(module, ExpandedAttention):
            module.config, module.widened = SeenConfig(module.config), partial(joint, module)
        elif isinstance(module, ExpandedModule) and DEFAULT_NAME in module.expansions:
            blocks = module.expansions[DEFAULT_NAME]
            module.forward = partial(FORWARDS[type(blocks)], module, blocks, style)
        elif is_norm(module):
            module.forward = partial(norm, module, style)
        elif "Attention" in type(module).__name__:
            module.config = SeenConfig(module.config)
    return reference


def dense_gradients(
    model: Any, input_ids: Tensor, labels: Tensor, dtype: torch.dtype = torch.float64, **inputs: Tensor
) -> dict[str, Tensor]:
    """Gradients of the mean loss for every tensor of the expansion, by name."""
    reference = dense_reference(model, dtype).train()
    ALL_ATTENTION_FUNCTIONS.register(JOINT_ATTENTION, joint_attention)
    logits = reference(input_ids, use_cache=False, **inputs).logits
    losses_of = logits if dtype == torch.float64 else logits.float()
    functional.cross_entropy(losses_of[:, :-1].transpose(1, 2), labels[:, 1:]).backward()
    return {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
