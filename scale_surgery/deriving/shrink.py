"""Two tiny twins of a model, from its own config: all that is a number of features gets small, the rest stays.

The sizes of one twin differ from each other and from those of the other twin. What holds in both twins holds because
of how the model is made, and not because two of its sizes happen to be equal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from scale_surgery.deriving.build import LayersPlace, build_model, build_twin, find_place, read, text_config, token_ids
from scale_surgery.deriving.small_values import Values, Way, is_per_layer, shrink_values, ways
from scale_surgery.errors import Problem, UnsupportedFamilyError

LEAST_LAYERS = 3
# more layers cost seconds; then a few of each kind are chosen instead of all the first
MOST_IN_A_ROW = 5
MOST_PARAMETERS = 16_000_000
# attributes that number layers or modules
COUNTS = re.compile(r"(^|_)(idx|id|index|number|seed)$")
# part of the error of grouped products for strides that they do not take
KERNEL = "multiple of"
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
        """Return every size of the parameters."""
        return {size for parameter in self.model.parameters() for size in parameter.shape}


def describe_real(config: PreTrainedConfig, model: PreTrainedModel, place: LayersPlace) -> RealModel:
    """Compare the layers of a model, and choose the first ones, so many that every kind is among them."""
    forms, values = layer_forms(model, place), text_config(config).to_dict()
    lists = [value for key, value in values.items() if is_per_layer(key, value, place.count)]
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


def shrink(real: RealModel) -> tuple[PreTrainedConfig, PreTrainedConfig]:
    """Configs of two tiny twins, all of whose sizes differ; their models have been run once."""
    first, way = _shrink(real, ways(0))
    # most second twins can be made as the first
    second, _ = _shrink(real, [replace(way, scale=1), *ways(1)])
    return first, second


def _shrink(real: RealModel, tried: Iterable[Way]) -> tuple[PreTrainedConfig, Way]:
    """The first config whose model runs, and the way in which it was made."""
    problem: Problem | None = None
    way, known = Way(), set[str]()
    for way in tried:
        values = shrink_values(real, way)
        # many ways differ only in keys that this config lacks; a kernel that wants sizes which its vectors divide
        # fails with all others
        if (text := repr(values)) in known or not (way.is_round or problem is None or KERNEL not in problem.phrase):
            continue
        known.add(text)
        made = _attempt(real, values)
        if not isinstance(made, Problem):
            return made, way
        problem = made
    config = _repair(real, Way(way.scale))
    if config is not None:
        return config, Way(way.scale)
    assert problem is not None
    raise UnsupportedFamilyError(Problem("twin-not-run", "config.json", problem, model_type=real.config.model_type))


def _attempt(real: RealModel, values: Values) -> PreTrainedConfig | Problem:
    """Make a config from values, or say why it will not do."""
    try:
        config = type(real.config).from_dict(values)
        return _problem(real, config) or config
    # stock configs and models raise various errors for sizes that do not fit
    except Exception as error:
        return Problem("other-program", error=f"{type(error).__name__}: {' '.join(str(error).split())}"[:300])


def _problem(real: RealModel, config: PreTrainedConfig) -> Problem | None:
    with torch.device("meta"):
        model = build_model(config)
    place = find_place(model)
    if sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers())) > MOST_PARAMETERS:
        return Problem("twin-too-large", layer=max(real.kinds), layers=real.depth)
    if (layer := _other_layer(real, model, place)) is not None:
        return Problem("twin-without-layer", layer=layer)
    twin: Any = build_twin(config)
    # some kernels of half precision want sizes that their vectors divide
    for dtype in (torch.float32, torch.bfloat16):
        with torch.no_grad():
            logits = twin.to(dtype)(input_ids=token_ids(config), use_cache=False).logits
        if not torch.isfinite(logits).all():
            return Problem("twin-not-finite")
    return None


def _other_layer(real: RealModel, model: PreTrainedModel, place: LayersPlace | None) -> int | None:
    """The first layer whose twin has other modules, or looks like a layer of another kind; None where all fit."""
    if place is None or place.count != real.depth:
        return real.chosen[-1]
    made, wanted = layer_forms(model, place), [real.forms[layer] for layer in real.chosen]
    alike = [wanted[made.index(form)] for form in made]
    places = zip(real.chosen, made, alike, wanted, strict=True)
    return next((layer for layer, got, like, form in places if got.made_of != form.made_of or like != form), None)


def _repair(real: RealModel, way: Way) -> PreTrainedConfig | None:
    """Restore single keys of the user's config until a twin runs."""
    stated, small = real.config.to_dict(), shrink_values(real, way)
    for key in [key for key, value in stated.items() if small.get(key) != value]:
        made = _attempt(real, small | {key: stated[key]})
        if not isinstance(made, Problem):
            return made
    return None
