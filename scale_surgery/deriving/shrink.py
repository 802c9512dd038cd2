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
from scale_surgery.errors import UnsupportedFamilyError

LEAST_LAYERS = 3
# a twin of more layers costs seconds, and need not have all that lie below the first of some kind
MOST_IN_A_ROW = 5
MOST_PARAMETERS = 16_000_000
# attributes that number layers or modules
COUNTS = re.compile(r"(^|_)(idx|id|index|number|seed)$")
# what torch says of strides that its grouped products do not take
KERNEL = "multiple of"
PLAIN = (str, bool, int, float, type(None))


class LayerForm(NamedTuple):
    """What a layer is made of, and what its modules are told, in values that can be compared."""

    made_of: tuple[Any, ...]
    settings: tuple[Any, ...]


@dataclass(frozen=True)
class Real:
    """What the twins are to resemble.

    Attributes:
        config: The user's config.
        model: Its model, on the meta device.
        place: Where its layers are.
        forms: Of each layer what it is made of.
        kinds: Of each layer the number of the first that is made as it and told the same.
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
        """Of each layer of a twin the number of its first that is of the same kind."""
        shown = [self.kinds[layer] for layer in self.chosen]
        return tuple(map(shown.index, shown))

    @property
    def shown(self) -> dict[int, int]:
        """The first layer of each kind by its number in a twin, with its number in the model."""
        return {number: self.chosen[number] for number in dict.fromkeys(self.twin_kinds)}

    @property
    def dimensions(self) -> set[int]:
        """All sizes of parameters."""
        return {size for parameter in self.model.parameters() for size in parameter.shape}


def resemblance(config: PreTrainedConfig, model: PreTrainedModel, place: LayersPlace) -> Real:
    """Say what the twins of a model are to resemble: its first layers, so many that every kind of layer is shown.

    One kind is shown twice where that is possible: what passes by a layer can be proved beside what goes through it.
    """
    forms, values = layer_forms(model, place), text_config(config).to_dict()
    lists = [value for key, value in values.items() if is_per_layer(key, value, place.count)]
    sorts = [(form, [_sort(values_of_layers[layer]) for values_of_layers in lists]) for layer, form in enumerate(forms)]
    kinds = tuple(map(sorts.index, sorts))
    depth = max(LEAST_LAYERS, max(kinds) + 1)
    depth += len(set(kinds[:depth])) == depth
    return Real(config, model, place, forms, kinds, tuple(range(min(place.count, depth))))


def selected(real: Real) -> Real | None:
    """The same with a few layers of each kind in place of all the first, where some kind comes late; else None."""
    if real.depth <= MOST_IN_A_ROW:
        return None
    first = sorted(set(real.kinds))
    more = [layer for layer in range(real.place.count) if layer not in first]
    missing = max(LEAST_LAYERS - len(first), 1)
    return replace(real, chosen=tuple(sorted([*first, *more[:missing]])))


def layer_forms(model: PreTrainedModel, place: LayersPlace) -> list[LayerForm]:
    """Say of each layer what it is made of, and what its modules are told."""
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
    """What its modules keep in plain attributes, such as whether positions turn queries; no numbers."""
    modules = ((name, module) for name, module in layer.named_modules() if not _is_numbered(name))
    return tuple(
        (name, key, _sort(value))
        for name, module in modules
        for key, value in vars(module).items()
        if isinstance(value, PLAIN) and not key.startswith("_") and not COUNTS.search(key)
    )


def _sort(value: Any) -> Any:
    """Of which sort a value is: a word as it is, a number by whether it is zero."""
    if isinstance(value, str):
        return None if re.search(r"\d", value) else value
    return bool(value) if isinstance(value, PLAIN) else None


def _is_numbered(name: str) -> bool:
    """Whether a module is one of many of its kind: the number of experts is none of a layer's."""
    return any(part.isdigit() and part != "0" for part in name.split("."))


def shrink(real: Real) -> tuple[PreTrainedConfig, PreTrainedConfig]:
    """Make the configs of two tiny twins, all of whose sizes differ."""
    first, way = _shrink(real, ways(0))
    # in the way of the first, most of them, and none is tried in vain
    second, _ = _shrink(real, [replace(way, scale=1), *ways(1)])
    return first, second


def _shrink(real: Real, tried: Iterable[Way]) -> tuple[PreTrainedConfig, Way]:
    """The first config whose model runs, and the way in which it was made."""
    problem, way, known = "", Way(), set[str]()
    for way in tried:
        values = shrink_values(real, way)
        # many ways differ in what this config has not; where a kernel wants sizes that its vectors divide, others are
        # tried in vain
        if (text := repr(values)) in known or not (way.is_round or KERNEL not in problem):
            continue
        known.add(text)
        config, problem = _attempt(real, values)
        if config is not None:
            return config, way
    config = _repair(real, Way(way.scale))
    if config is not None:
        return config, Way(way.scale)
    raise UnsupportedFamilyError(
        f"config.json: no small twin of {real.config.model_type!r} could be built and run: {problem}. "
        "Facts are derived from one; is this config complete?"
    )


def _attempt(real: Real, values: Values) -> tuple[PreTrainedConfig | None, str]:
    """A config from values, or why it will not do."""
    try:
        config = type(real.config).from_dict(values)
        return (config, "") if (problem := _problem(real, config)) is None else (None, problem)
    # a stock config or model says in its own way that its sizes do not fit
    except Exception as error:
        return None, f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _problem(real: Real, config: PreTrainedConfig) -> str | None:
    with torch.device("meta"):
        model = build_model(config)
    place = find_place(model)
    if sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers())) > MOST_PARAMETERS:
        return f"it would be large: layer {max(real.kinds)} is the first of its kind, and it has {real.depth} layers"
    if (layer := _other_layer(real, model, place)) is not None:
        return f"it has none that is made as layer {layer}"
    twin: Any = build_twin(config)
    # some kernels of half precision want sizes that their vectors divide
    for dtype in (torch.float32, torch.bfloat16):
        with torch.no_grad():
            logits = twin.to(dtype)(input_ids=token_ids(config), use_cache=False).logits
        if not torch.isfinite(logits).all():
            return "its logits are not finite"
    return None


def _other_layer(real: Real, model: PreTrainedModel, place: LayersPlace | None) -> int | None:
    """The first layer that a twin has in another form, or like one of another kind; None where it has all."""
    if place is None or place.count != real.depth:
        return real.chosen[-1]
    made, wanted = layer_forms(model, place), [real.forms[layer] for layer in real.chosen]
    alike = [wanted[made.index(form)] for form in made]
    places = zip(real.chosen, made, alike, wanted, strict=True)
    return next((layer for layer, got, like, form in places if got.made_of != form.made_of or like != form), None)


def _repair(real: Real, way: Way) -> PreTrainedConfig | None:
    """Give back one key after the other what the user's config says, until the twin runs."""
    stated, small = real.config.to_dict(), shrink_values(real, way)
    for key in [key for key, value in stated.items() if small.get(key) != value]:
        config, _ = _attempt(real, small | {key: stated[key]})
        if config is not None:
            return config
    return None
