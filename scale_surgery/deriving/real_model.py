"""The user's model on the meta device: where its layers are, and which of them are alike."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from scale_surgery.deriving.build import LayersPlace, read, text_config
from scale_surgery.planning.per_layer import per_layer_lists

LEAST_LAYERS = 3
# more layers cost seconds; then a few of each kind are chosen instead of all the first
MOST_IN_A_ROW = 5
# attributes that number layers or modules
COUNTS = re.compile(r"(^|_)(idx|id|index|number|seed)$")
PLAIN = (str, bool, int, float, type(None))


class LayerForm(NamedTuple):
    """Modules and parameters of a layer, and the settings of its modules, in values that can be compared."""

    made_of: tuple[Any, ...]
    settings: tuple[Any, ...]


@dataclass(frozen=True)
class RealModel:
    """The user's model, of which twins are made.

    Attributes:
        config: The user's config.
        model: Its model, on the meta device.
        place: Where its layers are.
        forms: Modules and settings of each layer.
        kinds: For each layer the number of the first layer with the same modules and settings.
        chosen: Layers that show every kind, the twins' layers in their order.
    """

    config: PreTrainedConfig
    model: PreTrainedModel
    place: LayersPlace
    forms: Sequence[LayerForm]
    kinds: tuple[int, ...]
    chosen: tuple[int, ...]

    @property
    def depth(self) -> int:
        """Number of layers of a twin."""
        return len(self.chosen)

    @property
    def twin_kinds(self) -> tuple[int, ...]:
        """For each layer of a twin the number of the first of its kind."""
        shown = [self.kinds[layer] for layer in self.chosen]
        return tuple(map(shown.index, shown))

    @property
    def shown(self) -> dict[int, int]:
        """For the first layer of each kind, its number in a twin and its number in the model."""
        return {number: self.chosen[number] for number in dict.fromkeys(self.twin_kinds)}

    @property
    def dimensions(self) -> set[int]:
        """Every size of the parameters."""
        return {size for parameter in self.model.parameters() for size in parameter.shape}


def describe_real(config: PreTrainedConfig, model: PreTrainedModel, place: LayersPlace) -> RealModel:
    """Compare the layers of a model, and choose the first ones, so many that every kind is among them."""
    forms, values = layer_forms(model, place), text_config(config).to_dict()
    lists = per_layer_lists(values, place.count).values()
    sorts = [(form, [_sort(values_of_layers[layer]) for values_of_layers in lists]) for layer, form in enumerate(forms)]
    kinds = tuple(map(sorts.index, sorts))
    depth = max(LEAST_LAYERS, max(kinds) + 1)
    # one kind is there twice where that is possible, so that one of them can be left unexpanded in a proof
    depth += len(set(kinds[:depth])) == depth
    return RealModel(config, model, place, forms, kinds, tuple(range(min(place.count, depth))))


def with_few_layers(real: RealModel) -> RealModel | None:
    """The same with a few layers of each kind in place of all the first ones; None where the first ones are few."""
    if real.depth <= MOST_IN_A_ROW:
        return None
    first = sorted(set(real.kinds))
    more = [layer for layer in range(real.place.count) if layer not in first]
    missing = max(LEAST_LAYERS - len(first), 1)
    return replace(real, chosen=tuple(sorted([*first, *more[:missing]])))


def layer_forms(model: PreTrainedModel, place: LayersPlace) -> list[LayerForm]:
    """Modules and settings of each layer."""
    types = read(text_config(model), "layer_types") or [None] * place.count
    layers = model.get_submodule(place.path)
    return [
        LayerForm(_made_of(layer, types[i] if i < len(types) else None), _settings(layer))
        for i, layer in enumerate(layers.children())
    ]


def _made_of(layer: nn.Module, layer_type: str | None) -> tuple[Any, ...]:
    """Its modules, their classes and parameters, and its type in the config."""
    modules = ((name, type(module).__name__) for name, module in layer.named_modules() if not _is_numbered(name))
    return layer_type, *modules, *(name for name, _ in layer.named_parameters() if not _is_numbered(name))


def _settings(layer: nn.Module) -> tuple[tuple[str, str, Any], ...]:
    """Plain attributes of its modules, such as whether it uses rope; of numbers only whether they are zero."""
    modules = ((name, module) for name, module in layer.named_modules() if not _is_numbered(name))
    return tuple(
        (name, key, _sort(value))
        for name, module in modules
        for key, value in vars(module).items()
        if isinstance(value, PLAIN) and not key.startswith("_") and not COUNTS.search(key)
    )


def _sort(value: Any) -> Any:
    """A word as it is, a number by whether it is zero; None for all else."""
    if isinstance(value, str):
        return None if re.search(r"\d", value) else value
    return bool(value) if isinstance(value, PLAIN) else None


def _is_numbered(name: str) -> bool:
    """Return True if a module is one of several of its kind, such as experts, beyond the first."""
    return any(part.isdigit() and part != "0" for part in name.split("."))
