"""Two tiny twins of a model, from its own config: all that is a number of features gets small, the rest stays.

The sizes of one twin differ from each other and from those of the other twin. What holds in both twins holds because
of how the model is made, and not because two of its sizes happen to be equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from scale_surgery.deriving.build import Place, build, build_twin, find_place, read, text_config, token_ids
from scale_surgery.deriving.small_values import Real, Values, Way, shrink_values, ways
from scale_surgery.errors import UnsupportedFamilyError

LEAST_LAYERS = 3
MOST_PARAMETERS = 16_000_000


def signatures(model: PreTrainedModel, place: Place) -> list[tuple[Any, ...]]:
    """Say of each layer what it is made of: its modules, their classes and parameters, and its type in the config."""
    types = read(text_config(model), "layer_types") or [None] * place.count
    layers = model.get_submodule(place.path)
    return [
        (
            types[i] if i < len(types) else None,
            *((name, type(own).__name__) for name, own in layer.named_modules() if not _is_numbered(name)),
            *(name for name, _ in layer.named_parameters() if not _is_numbered(name)),
        )
        for i, layer in enumerate(layers.children())
    ]


def _is_numbered(name: str) -> bool:
    """Whether a module is one of many of its kind: the number of experts is none of a layer's."""
    return any(part.isdigit() and part != "0" for part in name.split("."))


def least_depth(model: PreTrainedModel, place: Place) -> int:
    """Count the first layers that show every kind of layer, at least three."""
    found = signatures(model, place)
    last_new = max(found.index(own) for own in found)
    return min(place.count, max(LEAST_LAYERS, last_new + 1))


def shrink(real: Real) -> tuple[PreTrainedConfig, PreTrainedConfig]:
    """Make the configs of two tiny twins.

    Args:
        real: What they are to resemble.

    Returns:
        Two configs of the same class; their models have the same kinds of layers and have been run once.

    Raises:
        UnsupportedFamilyError: If no way leads to a model that runs; the message says what went wrong in the last.
    """
    first, way = _shrink(real, ways(0))
    # what does not do for one twin hardly does for the other
    second, _ = _shrink(real, (replace(way, scale=1), *ways(1)))
    return first, second


def _shrink(real: Real, tried: Iterable[Way]) -> tuple[PreTrainedConfig, Way]:
    """The first config whose model runs, and the way in which it was made."""
    problem, scale, known = "", 0, set[str]()
    for way in tried:
        values, scale = shrink_values(real, way), way.scale
        # many ways differ in what this config has not
        if (text := repr(values)) in known:
            continue
        known.add(text)
        config, problem = _attempt(real, values)
        if config is not None:
            return config, way
    config = _repair(real, Way(scale))
    if config is not None:
        return config, Way(scale)
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
        return None, f"{type(error).__name__}: {error}".split("\n")[0][:200]


def _problem(real: Real, config: PreTrainedConfig) -> str | None:
    with torch.device("meta"):
        model = build(config)
    place = find_place(model)
    if sum(own.numel() for own in (*model.parameters(), *model.buffers())) > MOST_PARAMETERS:
        return "it would be large"
    if place is None or signatures(model, place) != signatures(real.model, real.place)[: real.depth]:
        return "its layers are not of the same kinds"
    twin: Any = build_twin(config)
    # some kernels of half precision want sizes that their vectors divide
    for dtype in (torch.float32, torch.bfloat16):
        with torch.no_grad():
            logits = twin.to(dtype)(input_ids=token_ids(config), use_cache=False).logits
        if not torch.isfinite(logits).all():
            return "its logits are not finite"
    return None


def _repair(real: Real, way: Way) -> PreTrainedConfig | None:
    """Give back one key after the other what the user's config says, until the twin runs."""
    stated, small = real.config.to_dict(), shrink_values(real, way)
    for key in [key for key, value in stated.items() if small.get(key) != value]:
        config, _ = _attempt(real, small | {key: stated[key]})
        if config is not None:
            return config
    return None
