"""From two twins to facts: those that hold in both, with the sizes of the real model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from scale_surgery.deriving.build import (
    LayersPlace,
    build_twin,
    find_place,
    read,
    stock_classes,
    text_config,
    token_ids,
)
from scale_surgery.deriving.configs import own_code_of
from scale_surgery.deriving.disk import unread_names
from scale_surgery.deriving.fallback import STRENGTH, weaker_block
from scale_surgery.deriving.layer import TwinLayer, derive_layer
from scale_surgery.deriving.norms import epsilon
from scale_surgery.deriving.outside import Outside, derive_outside, find_softcap
from scale_surgery.deriving.part import features, is_transposed
from scale_surgery.deriving.real_model import RealModel
from scale_surgery.deriving.watch import watch
from scale_surgery.deriving.zero_output import zero_output_names
from scale_surgery.errors import Problem, UnsupportedFamilyError
from scale_surgery.planning.architecture import CONFIG_KEYS, Architecture, Block, Kind, Linear, Sizes
from scale_surgery.planning.base import sizes_of_blocks

HEAD_SIZE = re.compile(r"^(attention_)?head_?(dim|size)$|^d_head$|^kv_channels$|^dim_head$")


@dataclass(frozen=True)
class WatchedTwin:
    """A tiny model that ran once, with one layer of each kind by its number, and the modules around the layers."""

    model: PreTrainedModel
    place: LayersPlace
    layers: dict[int, TwinLayer]
    outside: Outside


@dataclass(frozen=True)
class CommonFacts:
    """Facts that hold in two twins, in the sizes of the first; kinds are by the number of a layer of that kind."""

    outside: Outside
    kinds: dict[int, Kind]
    softcap: tuple[str, float | None] | None


def watch_twin(config: PreTrainedConfig, shown: Mapping[int, int]) -> WatchedTwin:
    """Build a twin, run it, and derive its layers and what surrounds them."""
    model = build_twin(config)
    place = find_place(model)
    assert place is not None
    trace = watch(model, token_ids(config), place.path)
    layers = {
        number: derive_layer(trace, path := f"{place.path}.{number}", model.get_submodule(path), f"{place.path}.{name}")
        for number, name in shown.items()
    }
    return WatchedTwin(model, place, layers, derive_outside(trace, model, place))


def agree_twins(first: WatchedTwin, second: WatchedTwin) -> CommonFacts:
    """The facts that hold in both twins."""
    return CommonFacts(
        outside=_agree_outside(first.outside, second.outside),
        kinds=_agreed_kinds(first, second),
        softcap=find_softcap(first.model),
    )


def derive_architecture(real: RealModel, common: CommonFacts) -> Architecture:
    """The facts that hold in two twins, with the sizes of the real model."""
    config, outside = text_config(real.config), common.outside
    kinds, kind_of_layer = _real_kinds(real, common.kinds)
    stock = stock_classes(real.config)
    classes = {name: model.__name__ for name, model in stock.items()}
    enters = "embedding" if outside.is_plain else "hook"
    return Architecture(
        model_type=real.config.model_type,
        config_class=type(real.config).__name__,
        classes=classes,
        own_code=own_code_of(real.config, stock),
        base_model=real.place.base,
        layers=real.place.layers,
        embedding=outside.embedding,
        final_norm=outside.final_norm,
        head=outside.head,
        kinds=kinds,
        kind_of_layer=kind_of_layer,
        padded=outside.padded if enters == "embedding" else (),
        first_norms=outside.first_norms if enters == "embedding" else (),
        enters=enters,  # type: ignore[arg-type]
        transposed=any(is_transposed(module) for module in real.model.modules()),
        softcap=common.softcap,
        keys={name: key for name, common in CONFIG_KEYS.items() if (key := _key(config, common)) is not None},
        layer_types=_layer_types(config),
        unread=unread_names(real.model),
        weightless=_weightless(real, kinds, kind_of_layer, outside),
    )


def derive_sizes(real: RealModel, architecture: Architecture) -> Sizes:
    """Read the sizes of the real model off its modules."""
    whole: Any = real.model
    head, embedding = whole.get_output_embeddings(), whole.get_input_embeddings()
    base = real.model.get_submodule(architecture.base_model)
    vocabulary = head.weight.shape[0]
    return Sizes(
        hidden=head.weight.shape[1],
        layers=real.place.count,
        **sizes_of_blocks(architecture),
        vocabulary=vocabulary,
        unpredicted=embedding.weight.shape[0] - vocabulary,
        epsilon=epsilon(base.get_submodule(architecture.final_norm.name)),
        # a class may keep two parameters although its config says that they are tied
        is_tied=head.weight is embedding.weight,
    )


def _key(config: PreTrainedConfig, common: str) -> str | None:
    key = config.attribute_map.get(common, common)
    return key if key in config.to_dict() else None


def _weightless(
    real: RealModel, kinds: tuple[Kind, ...], kind_of_layer: tuple[int, ...], outside: Outside
) -> tuple[str, ...]:
    """Norms of the real model that have no weight."""
    names = [outside.final_norm.name]
    for layer, number in enumerate(kind_of_layer):
        kind = kinds[number]
        inside = [norm.name for norm in (*kind.pre_norms, *kind.post_norms)]
        inside += [norm.name for block in kind.blocks for norm in block.inner_norms]
        names += [f"{real.place.layers}.{layer}.{name}" for name in inside]
    base = real.model.get_submodule(real.place.base)
    return tuple(name for name in names if not list(base.get_submodule(name).parameters()))


def _layer_types(config: PreTrainedConfig) -> tuple[str, ...]:
    types = (config.to_dict().get("layer_types") and read(config, "layer_types")) or ()
    # with full attention everywhere nothing depends on the number of a layer
    return tuple(types) if set(types) - {"full_attention"} else ()


def _agree_outside(first: Outside, second: Outside) -> Outside:
    if replace(first, is_plain=True, padded=(), first_norms=()) != replace(
        second, is_plain=True, padded=(), first_norms=()
    ):
        raise UnsupportedFamilyError(Problem("twins-differ-outside", first=first, second=second))
    return first if first == second else replace(first, is_plain=False)


def _agreed_kinds(first: WatchedTwin, second: WatchedTwin) -> dict[int, Kind]:
    """The kinds of layers of the first twin on which the second agrees but for sizes."""
    heads = read(text_config(second.model), "num_attention_heads") or 1
    mutes = zero_output_names(first.model, first.place.path, first.layers)
    kinds = {}
    for number, layer in first.layers.items():
        module = second.model.get_submodule(f"{second.place.path}.{number}")
        expected = number_kind(layer.kind, module, heads)
        kind = agree(layer.kind, expected, second.layers[number].kind)
        blocks = tuple(replace(block, mute=ends) for block, ends in zip(kind.blocks, mutes[number], strict=True))
        kinds[number] = replace(kind, blocks=blocks)
    return kinds


def agree(kind: Kind, expected: Kind, second: Kind) -> Kind:
    """Keep what holds in both twins; a block about which they disagree is treated in a weaker way."""
    names = [[block.name for block in twin_kind.blocks] for twin_kind in (expected, second)]
    if names[0] != names[1] or replace(expected, blocks=()) != replace(second, blocks=()):
        raise UnsupportedFamilyError(Problem("twins-differ-inside", first=expected, second=second))
    return replace(kind, blocks=tuple(map(_agree_block, kind.blocks, expected.blocks, second.blocks)))


def _agree_block(block: Block, expected: Block, second: Block) -> Block:
    if replace(expected, reason="") == replace(second, reason=""):
        return block
    if STRENGTH.index(second.treatment) > STRENGTH.index(block.treatment):
        return second
    if STRENGTH.index(second.treatment) < STRENGTH.index(block.treatment):
        return block
    weaker = weaker_block(replace(block, mute=("",)), "what is true of one twin is not true of one of other sizes")
    if weaker is None:
        raise UnsupportedFamilyError(Problem("block-differs", f"{block.name} ({block.kind})"))
    return replace(weaker, mute=())


def _real_kinds(real: RealModel, kinds: dict[int, Kind]) -> tuple[tuple[Kind, ...], tuple[int, ...]]:
    """The kinds of the real model's layers, and the number of that of each layer."""
    real_kinds, numbers = list[Kind](), list[int]()
    heads = read(text_config(real.config), "num_attention_heads") or 1
    layers = real.model.get_submodule(real.place.path)
    for first, layer in zip(real.kinds, layers.children(), strict=True):
        kind = number_kind(kinds[real.chosen.index(first)], layer, heads)
        if kind not in real_kinds:
            real_kinds.append(kind)
        numbers.append(real_kinds.index(kind))
    return tuple(real_kinds), tuple(numbers)


def number_kind(kind: Kind, layer: nn.Module, heads: int) -> Kind:
    """Give a kind the sizes of a layer."""
    return replace(kind, blocks=tuple(_number_block(block, layer, heads) for block in kind.blocks))


def _number_block(block: Block, layer: nn.Module, heads: int) -> Block:
    if block.treatment != "split":
        return replace(block, linears=tuple(_plain(linear, layer) for linear in block.linears))
    if block.group == "attn":
        return _number_attention(block, layer, heads)
    linears = []
    for linear in block.linears:
        inputs, outputs = features(layer.get_submodule(linear.name))
        # all roles of a linear of an MLP have equal shares
        shares = (outputs // len(linear.roles),) * len(linear.roles)
        linears.append(replace(linear, inputs=inputs, outputs=shares))
    return replace(block, linears=tuple(linears), inner=linears[-1].inputs)


def _plain(linear: Linear, layer: nn.Module) -> Linear:
    inputs, outputs = features(layer.get_submodule(linear.name))
    return replace(linear, inputs=inputs, outputs=(outputs,))


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
    """Size of the heads by an attribute of the module; None where no attribute divides its width."""
    sizes = (value for name, value in vars(module).items() if HEAD_SIZE.search(name) and type(value) is int)
    return next((value for value in sizes if value > 0 and width % value == 0), None)
