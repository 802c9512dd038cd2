"""Duplicate layers: a copy of a chosen layer comes right after it, and at first adds nothing to the residual stream.

    y = x + attn(x) + ...        where what the copy adds begins as zeros:  y = x, bit for bit

That is the block expansion of LLaMA Pro (arXiv 2401.02415). The result is a checkpoint of the base's own
architecture with more layers: stock classes load it, and only the copies are meant to train.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scale_surgery.checkpoint.folder import TensorInfo
from scale_surgery.checkpoint.numbering import AFTER, CONFIG_KEY, Numbering, numbering_of
from scale_surgery.errors import PlanError
from scale_surgery.planning.families import Family
from scale_surgery.planning.specs import FORMAT, NewTensor, Spec

# keys of config.json that hold one value for each layer
PER_LAYER_LISTS = ("layer_types",)


@dataclass(frozen=True)
class Binding:
    """A key of config.json by which layers are bound to each other or to their numbers, so that none can be copied.

    Attributes:
        key: The key.
        reason: What it means for the layers.
        harmless: Values by which nothing is bound; a key that is missing, null, false, 0 or empty never binds.
        switch: Key that turns it off where it is false, or None.
    """

    key: str
    reason: str
    harmless: tuple[object, ...] = ()
    switch: str | None = None

    def holds(self, config: Mapping[str, Any]) -> bool:
        """Whether a config binds its layers so."""
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


def check_duplicable(config: Mapping[str, Any]) -> None:
    """Check that layers of a model can be copied, whatever its family.

    Raises:
        PlanError: If they share caches or weights, or depend on their numbers; every key that says so is named.
    """
    nested = config.get("text_config")
    places = {"config.json": config, "config.json: text_config": nested if isinstance(nested, Mapping) else {}}
    problems = [
        f"{place}: {binding.key} is {own[binding.key]!r}: {binding.reason}, so no layer can be duplicated. Use "
        "--method scale or grow."
        for place, own in places.items()
        for binding in BINDINGS
        if binding.holds(own)
    ]
    if problems:
        raise PlanError.from_problems(problems)


def build_depth_specs(family: Family, layers: Sequence[int]) -> Spec:
    """What config.json says of duplicated layers, under a key of our own that stock code does not read.

    Args:
        family: Facts of the architecture.
        layers: Base layers that get a copy, ascending.

    Returns:
        Plain JSON values; `new_layers` are the positions of the copies.
    """
    numbering = Numbering(family.base_model, family.layers, tuple(layers))
    return {
        "format": FORMAT,
        "method": "depth",
        "variant": "depth",
        "base_model": family.base_model,
        "layers": family.layers,
        "expanded_layers": list(layers),
        "new_layers": list(numbering.new),
    }


def mute_modules(family: Family) -> tuple[str, ...]:
    """Modules of a layer that give zeros at the start of a copy: the last before the residual stream.

    That is the output projections of attention and MLP (LLaMA Pro, arXiv 2401.02415, section 3.2). Where a norm comes
    after them, it is this norm (ours): it would make an output projection that has left zero by however little as
    large as any other in one step.
    """
    return family.post_norms or tuple(linear.name for linear in family.linears if linear.writes() == ("residual",))


def depth_tensors(
    family: Family, layers: Sequence[int], prefix: str, tensors: Mapping[str, TensorInfo]
) -> Iterator[NewTensor]:
    """List the tensors of every copy: what writes into the residual stream begins mute, everything else is copied.

    Args:
        family: Facts of the architecture.
        layers: Base layers that get a copy.
        prefix: What stands before the base model's names on disk.
        tensors: Tensors of the base.

    Yields:
        The new tensors; see depth_names.py for their names.
    """
    mute = mute_modules(family)
    norms = (*family.pre_norms, *family.post_norms, *(norm.name for norm in family.inner_norms))
    kinds = dict.fromkeys((linear.name for linear in family.linears), "linear") | dict.fromkeys(norms, "norm")
    for layer in layers:
        path = f"{prefix}{family.layers}.{layer}."
        for module, kind in kinds.items():
            for block in ("weight", "bias"):
                if (source := tensors.get(f"{path}{module}.{block}")) is not None:
                    name = f"{path}{AFTER}{module}.{block}"
                    is_copy = module not in mute
                    yield NewTensor(name, source.shape, block, kind, layer, source.name, is_copy=is_copy)


def check_depth_config(family: Family, config: Mapping[str, Any], layers: int) -> None:
    """Check that what config.json says layer by layer can be said of more layers.

    Args:
        family: Facts of the architecture.
        config: Parsed config.json of the base.
        layers: Number of its layers.

    Raises:
        PlanError: If a list has another length than there are layers, or a number of layers is none.
    """
    lists = {key: config[key] for key in PER_LAYER_LISTS if config.get(key) is not None}
    problems = [
        f"config.json: {key} is {value!r}, expected a list of {layers}, one for each layer. Is this config.json from "
        "this checkpoint?"
        for key, value in lists.items()
        if not isinstance(value, list) or len(value) != layers
    ]
    types = family.types_by_number
    number = config.get(types.key, types.default) if types is not None and types.key else 1
    if type(number) is not int or number < 0 or (number == 0 and types is not None and types.rule == "every"):
        assert types is not None
        problems.append(f"config.json: {types.key} is {number!r}, expected a number of layers.")
    if problems:
        raise PlanError.from_problems(problems)


def deepened_config(config: Mapping[str, Any], specs: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Edit a base model's config.json: more layers, each copy of the type of its source, everything else as it was.

    Where the config leaves the types of layers to their numbers, they are written out: a copy changes the numbers
    above it. Where all layers are alike nothing is written, since a list makes some classes behave in another way.

    Args:
        config: Parsed config.json of the base.
        specs: Result of `build_depth_specs`.
        family: Facts of the architecture.

    Returns:
        The new config.
    """
    copied = specs["expanded_layers"]
    key = family.key("layers")
    layers = int(config[key])
    edited = dict(config) | {key: layers + len(copied), CONFIG_KEY: dict(specs)}
    per_layer = {name: config[name] for name in PER_LAYER_LISTS if config.get(name) is not None}
    if "layer_types" not in per_layer and family.types_by_number is not None:
        found = family.types_by_number.of(config, layers)
        per_layer |= {} if found is None else {"layer_types": found}
    for name, values in per_layer.items():
        edited[name] = [value for i, value in enumerate(values) for _ in range(2 if i in copied else 1)]
    return edited


def refuse_depth(specs: Mapping[str, Any], title: object, reason: str) -> None:
    """Refuse a model with duplicated layers where it makes no sense.

    Args:
        specs: Value of the key `scale_surgery` in its config.json.
        title: What it is called.
        reason: Why, and what to do instead.

    Raises:
        PlanError: If it is one.
    """
    if numbering_of(specs) is not None:
        raise PlanError(f"{title}: was made by --method depth. {reason}")
