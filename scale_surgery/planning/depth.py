"""Duplicate layers: a copy of a chosen layer comes right after it, and at first adds nothing to the residual stream.

    y = x + attn(x) + ...        where what the copy adds begins as zeros:  y = x, bit for bit

That is the block expansion of LLaMA Pro (arXiv 2401.02415). The result is a checkpoint of the base's own
architecture with more layers: stock classes load it, and only the copies are meant to train.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from scale_surgery.checkpoint.headers import FLOAT_DTYPES
from scale_surgery.checkpoint.names import CONFIG_FILE
from scale_surgery.checkpoint.numbering import AFTER, CONFIG_KEY, Numbering
from scale_surgery.errors import PlanError, Problem
from scale_surgery.planning.architecture import Architecture, numberless
from scale_surgery.planning.base import Base
from scale_surgery.planning.costs import Costs, estimate_depth
from scale_surgery.planning.method import Method, Resolved
from scale_surgery.planning.per_layer import per_layer_lists
from scale_surgery.planning.request import VARIANTS, Request
from scale_surgery.planning.selection import format_layers, select_layers
from scale_surgery.planning.specs import FORMAT, Spec
from scale_surgery.planning.stored import layer_path
from scale_surgery.planning.tensors import NewTensor, TensorPlan


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

    def resolve(self, base: Base, request: Request) -> Resolved:
        """The layers that get a copy; nothing is widened."""
        return Resolved(select_layers(request.layers, base.sizes.layers))

    def specs(self, base: Base, request: Request, resolved: Resolved) -> Spec:
        """Which layers are copies."""
        check_depth_config(base.architecture, base.checkpoint.config, base.sizes.layers)
        specs = build_depth_specs(base.architecture, resolved.layers)
        _check_tensors(base, resolved.layers)
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


def _check_tensors(base: Base, layers: Sequence[int]) -> None:
    """Refuse copies that nothing makes mute, tensors that are not floats, and names on disk that cannot be numbered."""
    paths = [layer_path(base.architecture, base.prefix, layer) for layer in layers]
    floats = FLOAT_DTYPES.values()
    loud = dict[str, list[int]]()
    for layer in layers:
        for block in (name for name, values in _mute_blocks(base.architecture, layer).items() if not values):
            loud.setdefault(block, []).append(layer)
    problems = [
        Problem("copies-not-mute", f"--layers {format_layers(tuple(numbers))}", block=block)
        for block, numbers in loud.items()
    ]
    coded = [tensor.source for tensor in depth_tensors(base, layers) if base.loaded[tensor.source].dtype not in floats]
    problems += [Problem("copies-not-floats", "--method depth", tensors=coded)] if coded else []
    numbering = Numbering(base.architecture.base_model, base.architecture.layers, tuple(layers))
    if not numbering.numbers(f"{paths[0]}x"):
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


def mute_values(architecture: Architecture, layer: int) -> dict[str, int]:
    """Values by which a copy of a layer adds nothing, by the names in memory, inside the layer, of tensors."""
    return {name: value for values in _mute_blocks(architecture, layer).values() for name, value in values.items()}


def _mute_blocks(architecture: Architecture, layer: int) -> dict[str, dict[str, int]]:
    """The same for each block of the layer; empty for one that nothing makes mute."""
    blocks = {}
    for block in architecture.kind(layer).blocks:
        norm = block.post_norm
        # the norm that reads its output (ours): it would make an output projection that has left zero by however little
        # as large as any other in one step
        if norm and f"{architecture.layers}.{layer}.{norm}" not in architecture.weightless:
            blocks[block.name] = {f"{norm}.weight": architecture.mute_gain, f"{norm}.bias": 0}
        # the last before the residual stream: the output projections of attention and MLP (LLaMA Pro, arXiv 2401.02415,
        # section 3.2)
        else:
            blocks[block.name] = dict.fromkeys(block.mute, 0)
    return blocks


def depth_tensors(base: Base, layers: Sequence[int]) -> Iterator[NewTensor]:
    """The tensors of every copy: those of `mute_values` give zeros at first, all others are copies."""
    architecture = base.architecture
    for layer in layers:
        path, kind = layer_path(architecture, base.prefix, layer), architecture.kind(layer)
        inner = (norm.name for block in kind.blocks for norm in block.inner_norms)
        norms = {kind.on_disk(name) for name in (*(norm.name for norm in (*kind.pre_norms, *kind.post_norms)), *inner)}
        place, mute = f"{architecture.layers}.{layer}.", mute_values(architecture, layer)
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


def deepened_config(
    config: Mapping[str, Any],
    specs: Mapping[str, Any],
    architecture: Architecture,
    keys: Collection[str] | None = None,
) -> dict[str, Any]:
    """Edit a base model's config.json: more layers, each copy of the type of its source, everything else as it was.

    `keys` are those of lists with a value for each layer; default: what looks like one.
    """
    copied = specs["expanded_layers"]
    layers = len(architecture.kind_of_layer)
    edited = dict(config) | {architecture.keys["layers"]: layers + len(copied), CONFIG_KEY: dict(specs)}
    per_layer = {key: each for key, each in per_layer_lists(config, layers).items() if keys is None or key in keys}
    # where the config leaves the types of layers to their numbers, they are written out: a copy changes the numbers
    # above it; where all layers are alike nothing is written, since a list makes some classes behave in another way
    if "layer_types" not in per_layer and architecture.layer_types:
        per_layer["layer_types"] = list(architecture.layer_types)
    for name, values in per_layer.items():
        edited[name] = [value for i, value in enumerate(values) for _ in range(2 if i in copied else 1)]
    return edited


def check_depth_config(architecture: Architecture, config: Mapping[str, Any], layers: int) -> None:
    """Check that a config.json can describe more layers."""
    problems, types = list[Problem](), config.get("layer_types")
    if types is not None and "layer_types" not in per_layer_lists(config, layers):
        problems.append(Problem("config-layer-types", f"{CONFIG_FILE}: layer_types", value=types, layers=layers))
    if architecture.keys.get("layers") not in config:
        problems.append(Problem("config-without-layers", CONFIG_FILE))
    if problems:
        raise PlanError(*problems)
