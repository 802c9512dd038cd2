"""Which streams stand side by side where, and what every module of a composed model is told of that.

An expansion shares the base stream as long as nothing of it writes there: a `preserve` expansion always, any other
below its first layer with W12, its fork. From there on it has a base stream of its own and stands apart.
This file needs only torch and transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .expanded_attention import Part, expand_attention, switch_attention
from .expanded_model import ADDED_AFTER, ADDED_BEFORE, change_hidden, find_base_model, find_module, new_heads, specs_of
from .expanded_side_by_side import ComposedModule, PathThrough, compose_module

MODE = "composed"
# attributes of a composed module
COMPOSED_ATTRIBUTES = ("shared", "apart", "known_widths", "base_sections", "head_axis", "keeps_strides")
COMPOSED_ATTRIBUTES += ("stacked_width", "blocks", "gains")
# and of those before which streams enter
OWN_NAMES = (*COMPOSED_ATTRIBUTES, "rearranged", "entering")
ATTENTION_VALUES = ("attributes", "config")


class Stage(NamedTuple):
    """Names of the expansions that share the base stream, and of those that stand apart, in this order."""

    shared: tuple[str, ...]
    apart: tuple[str, ...]

    def streams(self) -> list[tuple[str, bool]]:
        """The streams side by side: each an expansion, or "" for the base, and whether it is an up stream."""
        return [("", False), *((name, True) for name in self.shared)] + [
            (name, is_up) for name in self.apart for is_up in (False, True)
        ]


class Rearranged(NamedTuple):
    """How the hidden state changes before a layer: up streams enter as zeros, base streams part.

    Attributes:
        before: Streams that arrive, each with its width.
        after: Streams that the layer reads.
    """

    before: dict[tuple[str, bool], int]
    after: dict[tuple[str, bool], int]

    def __call__(self, hidden: Tensor) -> Tensor:
        found = dict(zip(self.before, hidden.split(list(self.before.values()), dim=-1), strict=True))
        base = found["", False]
        for (name, is_up), width in self.after.items():
            if not is_up:
                found.setdefault((name, False), base)
            elif found.get((name, True), base[..., :0]).shape[-1] != width:
                found[name, True] = base.new_zeros(*base.shape[:-1], width)
        return torch.cat([found[stream] for stream in self.after], dim=-1)


def rearrange(layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Let streams enter and part before a layer; a hook, so that no stock forward is touched."""
    return None if layer.rearranged is None else change_hidden(args, kwargs, layer.rearranged)


def prepare(base_model: nn.Module, layers: nn.Module) -> None:
    """Put hooks where streams enter and part, which do nothing until expansions pass through."""
    for layer in layers:
        layer.rearranged = None
        layer.register_forward_pre_hook(rearrange, with_kwargs=True)
    if {ADDED_AFTER, ADDED_BEFORE}.intersection(signature(base_model.forward).parameters):
        base_model.entering = None
        base_model.register_forward_pre_hook(widen_added, with_kwargs=True)


def widen_added(base_model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Let what stock code adds to the hidden state between layers go to every base stream, as in expanded models."""
    if base_model.entering is None:
        return None

    def wide(features: Tensor, layer: int) -> Tensor:
        streams = base_model.entering[layer].items()
        zeros = (features.new_zeros(*features.shape[:-1], width) for _, width in streams)
        return torch.cat([own if is_up else features for own, ((_, is_up), _) in zip(zeros, streams, strict=True)], -1)

    own: dict[str, Any] = {}
    if kwargs.get(ADDED_AFTER) is not None:
        own[ADDED_AFTER] = [wide(features, layer + 1) for layer, features in enumerate(kwargs[ADDED_AFTER])]
    if kwargs.get(ADDED_BEFORE) is not None:
        own[ADDED_BEFORE] = {layer: wide(features, layer) for layer, features in kwargs[ADDED_BEFORE].items()}
    return args, kwargs | own


def fork_of(plan: dict[str, Any]) -> int | None:
    """The first layer in which an expansion writes into the base stream, or None."""
    return min(plan["collaborative"]["layers"], default=None)


def up_in(plan: dict[str, Any], spec: dict[str, Any], attention: dict[str, dict]) -> int:
    """Features of its up stream, or heads, that a module of an expansion reads.

    Args:
        plan: `config.scale_surgery` of the expanded model.
        spec: What that says of the module; empty where it is not expanded.
        attention: What it says of the attention of the layer.
    """
    kind, widths = spec.get("kind"), plan["widths"]
    if kind in ("linear", "grown"):
        return spec["in_features"][1]
    if kind == "head_norm":
        heads = next(own for own in attention.values())
        new = new_heads(plan, heads)
        return new.heads if spec["heads"] == heads["heads"] else new.kv_heads
    if kind == "passing" and spec["base"] is None:
        return 0
    own = {"norm": spec.get("up"), "activation": widths["up_inner_width"]}
    return own.get(kind, widths["up_width"] if kind in ("passing", "block") else 0)


class Place(NamedTuple):
    """Where composed modules are made: in the base model, or in one of its layers.

    Attributes:
        stock: The part of the composed model.
        own: The same part of each expanded model, by name of the expansion.
        specs: What each says of its modules there.
        attention: What each says of its attention there.
        stage: The streams that pass through.
    """

    stock: nn.Module
    own: dict[str, nn.Module]
    specs: dict[str, dict[str, dict]]
    attention: dict[str, dict[str, dict]]
    stage: Stage

    def compose(self, plans: dict[str, dict], paths: dict[str, dict]) -> None:
        """Let all paths pass through the modules of this place.

        Args:
            plans: `config.scale_surgery` of each expansion.
            paths: What base streams apart have to pass through, by name; it is nothing else where there is none.
        """
        names = dict.fromkeys(name for specs in self.specs.values() for name in specs)
        for name in dict.fromkeys([*names, *(paths if self.stage.apart else ())]):
            specs = {own: self.specs[own].get(name, {}) for own in (*self.stage.shared, *self.stage.apart)}
            known = [spec for spec in specs.values() if spec] + [own for own in [paths.get(name)] if own]
            members = tuple(
                PathThrough(
                    find_module(self.own[own], name),
                    up_in(plans[own], spec, self.attention[own]),
                    own in self.stage.apart,
                )
                for own, spec in specs.items()
            )
            compose_module(find_module(self.stock, name), members, known)


def restore(modules: Iterable[nn.Module]) -> None:
    """Make stock modules of all that paths pass through."""
    for module in modules:
        if isinstance(module, ComposedModule):
            module.__class__ = type(module).__bases__[1]
            for name in COMPOSED_ATTRIBUTES:
                vars(module).pop(name, None)
        if MODE in getattr(module, "modes", ()):
            switch_attention(module, "stock")
            del module.modes[MODE]
        for name in {"rearranged", "entering"}.intersection(vars(module)):
            setattr(module, name, None)


class Arrangement(NamedTuple):
    """How expansions pass through the modules, to be made again of restored ones; by default none does.

    Attributes:
        stage: Who leaves the last norm.
        told: Class of each module, what it knows, and what it knows of heads where it attends.
    """

    stage: Stage = Stage((), ())
    told: dict[nn.Module, tuple[type, dict[str, Any], dict[str, Any] | None]] = {}

    @classmethod
    def of(cls, model: nn.Module, stage: Stage) -> Arrangement:
        """As it is now."""
        found = {}
        for module in model.modules():
            told = {name: own for name, own in vars(module).items() if name in OWN_NAMES and own is not None}
            heads = getattr(module, "modes", {}).get(MODE)
            if told or heads:
                found[module] = type(module), told, heads
        return cls(stage, found)

    def again(self) -> None:
        """Make it again."""
        for module, (kind, told, heads) in self.told.items():
            module.__class__ = kind
            vars(module).update(told)
            if isinstance(module, ComposedModule):
                module.look_up()
            if heads:
                module.modes[MODE] = heads
                switch_attention(module, MODE)

    @property
    def heads(self) -> dict[int, list[Part]]:
        """Heads as they lie in the layers of the KV cache in which expansions have some, by number of the layer."""
        return {module.layer_idx: heads["parts"] for module, (_, _, heads) in self.told.items() if heads}


def compose_attention(module: nn.Module, facts: dict[str, Any], parts: list[Part]) -> None:
    """Tell an attention module of the heads of all paths.

    Args:
        module: The attention module.
        facts: `heads`, `kv_heads`, and what its stock forward reads where it has so many.
        parts: Heads that attend by themselves, in the order in which they lie.
    """
    if len(parts) == 1:
        return
    heads = sum(part.heads for part in parts)
    own = {key: {name: each * heads // facts["heads"] for name, each in facts[key].items()} for key in ATTENTION_VALUES}
    expand_attention(module, MODE, parts, **own)
    switch_attention(module, MODE)


def parts_of(stage: Stage, old: Part, new: dict[str, Part]) -> list[Part]:
    """Heads of all paths in the order in which they lie."""
    own = {name: old._replace(owner=name) for name in stage.apart}
    apart = [part for name in stage.apart for part in ([own[name], new[name]] if name in new else [own[name]])]
    return [old, *(new[name] for name in stage.shared if name in new), *apart]


def stages(plans: dict[str, dict], layers: int) -> Iterator[Stage]:
    """Who shares the base stream in each layer, and after the last one."""
    for layer in (*range(layers), layers - 1):
        apart = [name for name, plan in plans.items() if (own := fork_of(plan)) is not None and own <= layer]
        yield Stage(tuple(name for name in plans if name not in apart), tuple(apart))


def compose_layers(model: nn.Module, members: dict[str, nn.Module], facts: dict[str, Any]) -> Stage:
    """Let several expansions pass through a stock model side by side, until it is restored.

    Args:
        model: The stock model.
        members: Expanded models on its weights, by name.
        facts: What `build_paths` says of the base.

    Returns:
        Who leaves the last norm.
    """
    plans = {name: own.config.scale_surgery for name, own in members.items()}
    base_model = find_base_model(model, facts["base_model"])
    inner = {name: find_base_model(own, facts["base_model"]) for name, own in members.items()}
    layers = base_model.get_submodule(facts["layers"])
    *inside, last = stages(plans, len(layers))
    together = Stage(tuple(plans), ())
    # the streams that come to each layer, before some enter or part there
    entering = [widths_of(together, plans, facts["hidden"], is_entered=False)]
    for index, (layer, stage) in enumerate(zip(layers, inside, strict=True)):
        after = widths_of(stage, plans, facts["hidden"], is_entered=True)
        layer.rearranged = None if after == entering[-1] else Rearranged(entering[-1], after)
        entering.append(after)
        own = {name: each.get_submodule(facts["layers"])[index] for name, each in inner.items()}
        compose_layer(layer, index, own, plans, stage, facts["kinds"][facts["kind_of_layer"][index]])
    norm = {facts["last"]: {"kind": "passing", "base": None, "up": 0}}
    compose_outside(base_model, inner, plans, together, {}, facts["last"])
    compose_outside(base_model, inner, plans, last, norm, facts["last"])
    if "entering" in vars(base_model):
        base_model.entering = entering
    # stock code may have noted the width before the first layer
    widest = widths_of(together, plans, facts["hidden"], is_entered=True)
    base_model.get_submodule(facts["last"]).stacked_width = sum(widest.values())
    return last


def compose_outside(
    base_model: nn.Module,
    inner: dict[str, nn.Module],
    plans: dict[str, dict],
    stage: Stage,
    paths: dict[str, dict],
    last: str,
) -> None:
    """Let paths pass through what comes before the layers; or, where `paths` names it, through the last norm."""
    specs = {
        name: {key: own for key, own in plan["model"].items() if (key == last) == bool(paths)}
        for name, plan in plans.items()
    }
    attention: dict[str, dict] = {name: {} for name in plans}
    Place(base_model, inner, specs, attention, stage).compose(plans, paths)


def widths_of(stage: Stage, plans: dict[str, dict], hidden: int, *, is_entered: bool) -> dict[tuple[str, bool], int]:
    """The streams of a stage, each with its width; before the first layer some up streams have not entered."""
    up = {
        name: plan["widths"]["up_width"] * (is_entered or plan.get("enter") != "hook") for name, plan in plans.items()
    }
    return {(name, is_up): up[name] if is_up else hidden for name, is_up in stage.streams()}


def compose_layer(
    layer: nn.Module, index: int, own: dict[str, nn.Module], plans: dict[str, dict], stage: Stage, facts: dict[str, Any]
) -> None:
    """Let paths pass through one layer.

    Args:
        layer: The stock layer.
        index: Its number.
        own: The same layer of each expanded model.
        plans: `config.scale_surgery` of each expansion.
        stage: The streams that pass through.
        facts: What is said of layers of its kind.
    """
    specs, attention = {}, {}
    for name, plan in plans.items():
        is_expanded, said = index in plan["expanded_layers"], specs_of(plan, plan, index)
        specs[name], attention[name] = (said["expanded"], said["attention"]) if is_expanded else (said["passing"], {})
    Place(layer, own, specs, attention, stage).compose(plans, facts["modules"])
    for name, heads in facts["attention"].items():
        new = {
            one: new_heads(plans[one], each[name])._replace(owner=one)
            for one, each in attention.items()
            if name in each
        }
        old = Part(heads["heads"], heads["kv_heads"], is_old=True)
        compose_attention(layer.get_submodule(name), heads, parts_of(stage, old, new))
