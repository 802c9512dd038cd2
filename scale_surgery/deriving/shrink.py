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

from scale_surgery.deriving.build import LayersPlace, build_model, build_twin, find_place, token_ids
from scale_surgery.deriving.real_model import RealModel, layer_forms
from scale_surgery.deriving.small_values import Values, Way, shrink_values, ways
from scale_surgery.errors import Problem, UnsupportedFamilyError

MOST_PARAMETERS = 16_000_000
# part of the error of grouped products for strides that they do not take
KERNEL = "multiple of"


def shrink(real: RealModel) -> tuple[PreTrainedConfig, PreTrainedConfig]:
    """Configs of two tiny twins, all of whose sizes differ; their models have been run once."""
    first, way = shrink_once(real)
    # most second twins can be made as the first
    second, _ = _shrink(real, [replace(way, scale=1), *ways(1)])
    return first, second


def shrink_once(real: RealModel) -> tuple[PreTrainedConfig, Way]:
    """The config of one tiny twin, and the way in which it was made."""
    return _shrink(real, ways(0))


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
