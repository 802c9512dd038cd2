"""Whether layers of a model can be copied: what in config.json binds them to each other or to their numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scale_surgery.errors import PlanError
from scale_surgery.planning.architecture import Architecture

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


def binding_problems(config: Mapping[str, Any]) -> list[str]:
    """Keys of a config.json by which layers share caches or weights, or depend on their numbers, a line each."""
    nested = config.get("text_config")
    places = {"config.json": config, "config.json: text_config": nested if isinstance(nested, Mapping) else {}}
    return [
        f"{place}: {binding.key} is {own[binding.key]!r}: {binding.reason}, so no layer can be duplicated. Use "
        "--method scale or grow."
        for place, own in places.items()
        for binding in BINDINGS
        if binding.holds(own)
    ]


def per_layer_lists(config: Mapping[str, Any], layers: int) -> dict[str, list[Any]]:
    """Lists of a config.json that hold one value for each layer, by key."""
    lists = {key: value for key, value in config.items() if isinstance(value, list) and len(value) == layers}
    return {key: value for key, value in lists.items() if "layer" in key or key.endswith("_types")}


def check_depth_config(architecture: Architecture, config: Mapping[str, Any], layers: int) -> None:
    """Check that what config.json says layer by layer can be said of more layers."""
    problems = [
        f"config.json: {key} is {config[key]!r}, expected a list of {layers}, one for each layer. Is this config.json "
        "from this checkpoint?"
        for key in PER_LAYER_LISTS
        if config.get(key) is not None and key not in per_layer_lists(config, layers)
    ]
    if architecture.keys.get("layers") not in config:
        problems.append(
            "config.json: does not say itself how many layers there are, expected a language model without a part for "
            "images or sound. Use --method scale or grow."
        )
    if problems:
        raise PlanError.from_problems(problems)
