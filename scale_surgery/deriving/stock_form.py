"""Check if a stock class has a form with more heads: build its config and its model."""

from __future__ import annotations

import re
from itertools import count, islice

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from scale_surgery.deriving.build import build_model
from scale_surgery.deriving.part import features
from scale_surgery.planning.architecture import CONFIG_KEYS, Architecture, Block, Sizes

# keys that may hold the inner width of an MLP
INNER_KEYS = re.compile("inner|inter|ffn|ff_|mlp|feed")
NORM_OVER_HEADS = "its queries and keys are normalised over all heads at once, and new heads by themselves"
SIZE_FROM_HEADS = "its head size is the hidden size over the query heads, so more heads are smaller heads"


def stock_heads(real: PreTrainedModel, architecture: Architecture, sizes: Sizes) -> tuple[str, bool]:
    """Why the stock model cannot have more heads of the same size; and whether they must divide the hidden size."""
    blocks = [block for block in architecture.kinds[0].blocks if block.query_heads]
    if not architecture.is_uniform or not blocks:
        return "", False
    block = blocks[0]
    if any(norm.head_axis is None for norm in block.inner_norms):
        return NORM_OVER_HEADS, False
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
    """Why a stock model with so many key/value heads is no form of a merged one; None where it is."""
    wanted = {
        "query_heads": heads * block.queries_per_key_value,
        "key_value_heads": heads,
        "head_size": block.head_size,
    }
    changes = {architecture.keys.get(name, CONFIG_KEYS[name]): value for name, value in wanted.items()}
    try:
        model = _changed_model(real.config, changes)
    # the error of a config or model says best what it requires
    except Exception as error:
        return f"its config does not allow it: {' '.join(str(error).split())[:200]}"
    *_, writer = block.linears
    layer = _first_layer(model, architecture)
    if features(layer.get_submodule(writer.name))[0] != wanted["query_heads"] * block.head_size:
        return SIZE_FROM_HEADS
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
    stated = config.get_text_config(decoder=True).to_dict()
    keys = [key for key, value in stated.items() if INNER_KEYS.search(key) and (value is None or type(value) is int)]
    return next((key for key in keys if _sets_inner(config, architecture, blocks[0], key)), None)


def _sets_inner(config: PreTrainedConfig, architecture: Architecture, block: Block, key: str) -> bool:
    wider = block.inner + 8
    try:
        model = _changed_model(config, {key: wider})
    except Exception:
        return False
    return features(_first_layer(model, architecture).get_submodule(block.linears[-1].name))[0] == wider


def _first_layer(model: PreTrainedModel, architecture: Architecture) -> nn.Module:
    return model.get_submodule(f"{architecture.layers_path}.0")


def _changed_model(config: PreTrainedConfig, changes: dict[str, int]) -> PreTrainedModel:
    content, text = config.to_dict(), config.get_text_config(decoder=True)
    # of a model that sees images, the sizes stand in a config of their own
    inside = [key for key, value in vars(config).items() if value is text and text is not config]
    for place in [content[key] for key in inside] or [content]:
        place |= changes
    with torch.device("meta"):
        return build_model(type(config).from_dict(content))
