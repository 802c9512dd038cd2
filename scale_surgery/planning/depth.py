"""Duplicate layers: a copy of a chosen layer comes right after it, and at first adds nothing to the residual stream.

    y = x + attn(x) + ...        where what the copy adds begins as zeros:  y = x, bit for bit

That is the block expansion of LLaMA Pro (arXiv 2401.02415). The result is a checkpoint of the base's own
architecture with more layers: stock classes load it, and only the copies are meant to train.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from scale_surgery.checkpoint.headers import FLOAT_DTYPES
from scale_surgery.checkpoint.names import CONFIG_FILE
from scale_surgery.checkpoint.numbering import AFTER, CONFIG_KEY, Numbering, numbering_of
from scale_surgery.errors import PlanError, Problem
from scale_surgery.planning.architecture import Architecture, Kind, numberless
from scale_surgery.planning.base import Base
from scale_surgery.planning.costs import Costs, estimate_depth
from scale_surgery.planning.method import Method, Resolved
from scale_surgery.planning.request import VARIANTS, Request
from scale_surgery.planning.selection import select_layers
from scale_surgery.planning.specs import FORMAT, Spec
from scale_surgery.planning.stored import layer_path
from scale_surgery.planning.tensors import NewTensor, TensorPlan


@dataclass(frozen=True)
class Binding:
    """A key of config.json by which layers are bound to each other or to their numbers, so that none can be copied.

    Attributes:
        key: The key.
        reason: How it binds layers.
        harmless: Values by which nothing is bound; a key that is missing, null, false, 0 or empty never binds.
        switch: Key that turns it off where it is false, or None.
    """

    key: str
    reason: str
    harmless: tuple[object, ...] = ()
    switch: str | None = None

    def holds(self, config: Mapping[str, Any]) -> bool:
        """Return True if a config ties its layers in this way."""
        value = config.get(self.key)
        is_on = self.switch is None or bool(config.get(self.switch, True))
        return is_on and bool(value) and value not in self.harmless


BINDINGS = (
    Binding("num_kv_shared_layers", "its last layers read the key/value caches of lower ones"),
    Binding("num_kv_reuse_layers", "its last layers read the key/value caches of lower ones"),
    Binding("cla_share_factor", "neighbouring layers share one key/value cache", harmless=(1,), switch="use_cla"),
    Binding("use_cross_layer_attention", "layers read the key/value caches of others"),
    Binding("num_hidden_groups", "layers share their weights in groups"),
    Binding("num_mem_blocks", "layers share the weights of a few blocks"),
    Binding("hidden_size_per_layer_input", "each layer has a part of the embedding of its own"),
    Binding("per_layer_config", "layers have sizes of their own, by their numbers"),
    Binding("scale_attn_by_inverse_layer_idx", "each layer divides its attention by its number"),
    Binding("scale_depth", "each layer is scaled by the number of layers"),
)


class Depth(Method):
    """A copy of each chosen layer comes right after it, and begins by adding zeros."""

    name = "depth"
    variants = VARIANTS[name]
    verb = "duplicated"
    adds_layers = True
    refused: ClassVar[Mapping[str, str]] = {
        "quantised": "deepened-on-quantised",
        "route": "deepened-not-routed",
        "merge": "deepened-is-stock",
        "compose": "deepened-not-composed",
        "load_expansion": "deepened-in-memory",
        "strength": "deepened-not-dialled",
    }
    about_rows = "Each row is the copy after that base layer"

    def config_problems(self, config: Mapping[str, Any]) -> list[Problem]:
        """List keys by which layers share caches or weights, or depend on their numbers."""
        return binding_problems(config)

    def resolve(self, base: Base, request: Request) -> Resolved:
        """The layers that get a copy; nothing is widened."""
        return Resolved(select_layers(request.layers, base.sizes.layers))

    def specs(self, base: Base, request: Request, resolved: Resolved) -> Spec:
        """Which layers are copies."""
        check_depth_config(base.architecture, base.checkpoint.config, base.sizes.layers)
        specs = build_depth_specs(base.architecture, resolved.layers)
        _check_tensors(base, resolved.layers, numbering_of(specs))
        return specs

    def new_tensors(self, base: Base, specs: Spec) -> Iterator[NewTensor]:
        """Every tensor of every copy."""
        return depth_tensors(base, specs["expanded_layers"])

    def costs(self, base: Base, request: Request, specs: Spec, tensors: Sequence[TensorPlan]) -> Costs:
        """Nothing is decomposed, and training reaches down to the lowest copy."""
        return estimate_depth(base, specs, tensors)

    def guards(self, tensors: Sequence[TensorPlan], head: Sequence[TensorPlan]) -> tuple[TensorPlan, ...]:
        """Tensors whose zeros keep a copy from adding anything."""
        return tuple(tensor for tensor in tensors if tensor.init in ("zero", "mute"))

    def start(self, changed: int) -> str:
        """Describe whether copies still add nothing."""
        if not changed:
            return "new layers write zero"
        tensors = "1 tensor of a new layer is" if changed == 1 else f"{changed} tensors of new layers are"
        return f"{tensors} not as at the start"


def _check_tensors(base: Base, layers: Sequence[int], numbering: Numbering | None) -> None:
    """Refuse tensors of copied layers that are not floats, and layers whose names on disk cannot be numbered anew."""
    paths = [layer_path(base.architecture, base.prefix, layer) for layer in layers]
    floats = FLOAT_DTYPES.values()
    coded = [tensor.source for tensor in depth_tensors(base, layers) if base.loaded[tensor.source].dtype not in floats]
    problems = [Problem("copies-not-floats", "--method depth", tensors=coded)] if coded else []
    if numbering is not None and not numbering.numbers(f"{paths[0]}x"):
        problems.append(Problem("layers-named-otherwise", "--method depth", path=paths[0]))
    if problems:
        raise PlanError(*problems)


def build_depth_specs(architecture: Architecture, layers: Sequence[int]) -> Spec:
    """Specifications of duplicated layers, for the key `scale_surgery` of config.json, which stock code ignores."""
    numbering = Numbering(architecture.base_model, architecture.layers, tuple(layers))
    return {
        "format": FORMAT,
        "method": Depth.name,
        "variant": Depth.name,
        "base_model": architecture.base_model,
        "layers": architecture.layers,
        "expanded_layers": list(layers),
        "new_layers": list(numbering.new),
        # groups of its modules, for --train-only
        "groups": _groups(architecture),
    }


def _groups(architecture: Architecture) -> dict[str, str]:
    blocks = [block for kind in architecture.kinds for block in kind.blocks]
    inside = {linear.name: block.group for block in blocks if not block.name for linear in block.linears}
    return {**inside, **{block.name: block.group for block in blocks if block.name}}


def mute_tensors(kind: Kind) -> tuple[str, ...]:
    """Names in memory, inside a layer, of tensors that give zeros at the start of a copy."""
    # where a norm comes after the output projections, it is this norm (ours): it would make an output projection that
    # has left zero by however little as large as any other in one step
    if kind.post_norms:
        return tuple(f"{norm.name}.{part}" for norm in kind.post_norms for part in ("weight", "bias"))
    # the last before the residual stream: the output projections of attention and MLP (LLaMA Pro, arXiv 2401.02415,
    # section 3.2)
    return tuple(name for block in kind.blocks for name in block.mute)


def depth_tensors(base: Base, layers: Sequence[int]) -> Iterator[NewTensor]:
    """The tensors of every copy: those of `mute_tensors` begin with zeros as output, all others are copies."""
    architecture = base.architecture
    for layer in layers:
        path, kind = layer_path(architecture, base.prefix, layer), architecture.kind(layer)
        inner = (norm.name for block in kind.blocks for norm in block.inner_norms)
        norms = {kind.on_disk(name) for name in (*(norm.name for norm in (*kind.pre_norms, *kind.post_norms)), *inner)}
        place, mute = f"{architecture.layers}.{layer}.", mute_tensors(kind)
        for source in (
            info
            for name, info in base.loaded.items()
            # no module holds what only old files have
            if name.startswith(path) and not any(re.search(pattern, name) for pattern in architecture.unread)
        ):
            inside = source.name.removeprefix(path)
            module, _, block = inside.rpartition(".")
            _, _, in_memory = base.facts.in_memory.get(source.name, source.name).partition(place)
            is_copy = numberless(in_memory) not in mute
            sort = "norm" if module in norms else "linear"
            yield NewTensor(f"{path}{AFTER}{inside}", source.shape, block, sort, layer, source.name, is_copy=is_copy)


def deepened_config(config: Mapping[str, Any], specs: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Edit a base model's config.json: more layers, each copy of the type of its source, everything else as it was."""
    copied = specs["expanded_layers"]
    layers = len(architecture.kind_of_layer)
    edited = dict(config) | {architecture.keys["layers"]: layers + len(copied), CONFIG_KEY: dict(specs)}
    per_layer = per_layer_lists(config, layers)
    # where the config leaves the types of layers to their numbers, they are written out: a copy changes the numbers
    # above it; where all layers are alike nothing is written, since a list makes some classes behave in another way
    if "layer_types" not in per_layer and architecture.layer_types:
        per_layer["layer_types"] = list(architecture.layer_types)
    for name, values in per_layer.items():
        edited[name] = [value for i, value in enumerate(values) for _ in range(2 if i in copied else 1)]
    return edited


def binding_problems(config: Mapping[str, Any]) -> list[Problem]:
    """List keys of a config.json by which layers share caches or weights, or depend on their numbers."""
    nested = config.get("text_config")
    places = {"": config, "text_config.": nested if isinstance(nested, Mapping) else {}}
    return [
        Problem(
            "layers-bound", f"{CONFIG_FILE}: {place}{binding.key}", value=values[binding.key], reason=binding.reason
        )
        for place, values in places.items()
        for binding in BINDINGS
        if binding.holds(values)
    ]


def per_layer_lists(config: Mapping[str, Any], layers: int) -> dict[str, list[Any]]:
    """Lists of a config.json that hold one value for each layer, by key."""
    lists = {key: value for key, value in config.items() if isinstance(value, list) and len(value) == layers}
    return {key: value for key, value in lists.items() if "layer" in key or key.endswith("_types")}


def check_depth_config(architecture: Architecture, config: Mapping[str, Any], layers: int) -> None:
    """Check that a config.json can describe more layers."""
    problems, types = list[Problem](), config.get("layer_types")
    if types is not None and "layer_types" not in per_layer_lists(config, layers):
        problems.append(Problem("config-layer-types", f"{CONFIG_FILE}: layer_types", value=types, layers=layers))
    if architecture.keys.get("layers") not in config:
        problems.append(Problem("config-without-layers", CONFIG_FILE))
    if problems:
        raise PlanError(*problems)
