"""Whether a stock class has a form with more heads, all else equal: a config that says so is made, and its model."""

from __future__ import annotations

import re
from itertools import count, islice

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from scale_surgery.deriving.build import build_model
from scale_surgery.deriving.part import features
from scale_surgery.planning.architecture import CONFIG_KEYS, Architecture, Block, Sizes

# how a key may be called that holds a width inside an MLP
OF_INNER = re.compile("inner|inter|ffn|ff_|mlp|feed")
TOGETHER = "its queries and keys are normalised over all heads at once, and new heads by themselves"
SHARED = "its head size is the hidden size over the query heads, so more heads are smaller heads"


def stock_heads(real: PreTrainedModel, architecture: Architecture, sizes: Sizes) -> tuple[str, bool]:
    """Find whether the stock model can have more heads of the same size."""
    blocks = [block for block in architecture.kinds[0].blocks if block.query_heads]
    if not architecture.is_uniform or not blocks:
        return "", False
    block = blocks[0]
    if any(norm.head_axis is None for norm in block.inner_norms):
        return TOGETHER, False
    more = range(block.key_value_heads + 1, sizes.hidden + 1)
    divides = [heads for heads in more if sizes.hidden % (heads * block.queries_per_key_value) == 0]
    undivided = list(islice((heads for heads in count(block.key_value_heads + 1) if heads not in divides), 1))
    problem = _problem(real, architecture, block, undivided[0])
    if problem is None or not divides:
        return problem or "", False
    if (also := _problem(real, architecture, block, divides[0])) is None:
        return "", True
    return also, False


def _problem(real: PreTrainedModel, architecture: Architecture, block: Block, heads: int) -> str | None:
    """Why a stock model with so many key/value heads is not what a merged one has to be."""
    wanted = {
        "query_heads": heads * block.queries_per_key_value,
        "key_value_heads": heads,
        "head_size": block.head_size,
    }
    changes = {architecture.keys.get(name, CONFIG_KEYS[name]): value for name, value in wanted.items()}
    try:
        with torch.device("meta"):
            model = build_model(type(real.config).from_dict(real.config.to_dict() | changes))
    # a config that checks itself, or a model that does, says best what it wants
    except Exception as error:
        return f"its config does not allow it: {' '.join(str(error).split())[:200]}"
    *_, writer = block.linears
    layer = _first_layer(model, architecture)
    if features(layer.get_submodule(writer.name))[0] != wanted["query_heads"] * block.head_size:
        return SHARED
    linears = {linear.name for linear in block.linears}
    before = {name: tensor.shape for name, tensor in _first_layer(real, architecture).named_parameters()}
    changed = [name for name, tensor in layer.named_parameters() if before.get(name) != tensor.shape]
    outside = [name for name in changed if name.rpartition(".")[0] not in linears]
    return f"with more heads {', '.join(outside)} would be of another size" if outside else None


def inner_key(config: PreTrainedConfig, architecture: Architecture) -> str | None:
    """Find the key of a config that sets the inner width of an MLP; None where none does, or where layers differ."""
    blocks = [block for block in architecture.kinds[0].blocks if block.inner]
    if "inner" in architecture.keys or not architecture.is_uniform or not blocks:
        return architecture.keys.get("inner")
    stated = config.to_dict()
    keys = [key for key, value in stated.items() if OF_INNER.search(key) and (value is None or type(value) is int)]
    return next((key for key in keys if _sets_inner(config, architecture, blocks[0], key)), None)


def _sets_inner(config: PreTrainedConfig, architecture: Architecture, block: Block, key: str) -> bool:
    wider = block.inner + 8
    try:
        with torch.device("meta"):
            model = build_model(type(config).from_dict(config.to_dict() | {key: wider}))
    except Exception:
        return False
    return features(_first_layer(model, architecture).get_submodule(block.linears[-1].name))[0] == wider


def _first_layer(model: PreTrainedModel, architecture: Architecture) -> nn.Module:
    return model.get_submodule(f"{architecture.layers_path}.0")
