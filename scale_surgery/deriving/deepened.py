"""Prove that copies of layers add nothing at first, before a plan relies on it.

    config.json  --copies as planned-->  deepened config.json    layers keep their modules, settings and shapes
    stock twin   --copies as planned-->  deepened twin           logits and cached generation bit for bit, in two dtypes

The twin has one layer of each kind, and copied layers with the layer that comes after them: a copy may change what a
layer hands on, such as a selection of tokens, and only some kinds of layers read it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from scale_surgery.checkpoint.numbering import AFTER, CONFIG_KEY, Numbering
from scale_surgery.deriving.build import build_model, build_twin, text_config, token_ids, usual_torch
from scale_surgery.deriving.configs import config_of
from scale_surgery.deriving.derive import fingerprint_of, one_at_a_time, read_real
from scale_surgery.deriving.prove import Given, differences, given_by
from scale_surgery.deriving.real_model import RealModel
from scale_surgery.deriving.shrink import shrink_once
from scale_surgery.deriving.watch import first_tensor
from scale_surgery.errors import CheckpointError, PlanError, Problem, SurgeryError
from scale_surgery.planning.architecture import Architecture, numberless
from scale_surgery.planning.depth import build_depth_specs, deepened_config, mute_values
from scale_surgery.planning.per_layer import per_layer_lists
from scale_surgery.planning.selection import format_layers
from scale_surgery.running.loading import quiet_transformers

_known: dict[tuple[str, str, tuple[int, ...]], Problem | None] = {}


def order_of(layers: int, copied: Sequence[int]) -> list[int]:
    """For each position among copies the base layer that is there, or that is copied there."""
    return [layer for layer in range(layers) for _ in range(2 if layer in copied else 1)]


def prove_copies(
    config: Mapping[str, Any],
    deep: Mapping[str, Any],
    code: Path | None,
    architecture: Architecture,
    copied: Sequence[int],
) -> None:
    """Refuse copies of layers that change a model; results are cached.

    Args:
        config: The base's config.json.
        deep: The same with copies, as it is written.
        code: The folder whose own code may run, or None.
        architecture: Facts about the base.
        copied: The layers that get a copy.
    """
    base = config_of(config, code)
    key = fingerprint_of(base), json.dumps(deep, sort_keys=True, default=str), tuple(copied)
    with one_at_a_time:
        if key not in _known:
            with quiet_transformers(), usual_torch(), _as_refusal():
                _known[key] = _problem(base, config_of(deep, code), architecture, copied)
    if (problem := _known[key]) is not None:
        raise PlanError(problem)


@contextmanager
def _as_refusal() -> Iterator[None]:
    """Refuse copies if a model with more layers cannot be made or run; its error says why."""
    try:
        yield
    # a temporary file that cannot be written
    except CheckpointError:
        raise
    except Exception as error:
        words = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300].rstrip(".")
        reasons = error.problems if isinstance(error, SurgeryError) else (Problem("other-program", error=words),)
        raise PlanError(Problem("copies-not-proved", "--method depth", *reasons)) from error


def _problem(
    config: PreTrainedConfig, deep: PreTrainedConfig, architecture: Architecture, copied: Sequence[int]
) -> Problem | None:
    """The first thing that copies would change; None where they change nothing."""
    order = order_of(len(architecture.kind_of_layer), copied)
    real = read_real(config)
    found = _other_values(config.to_dict(), deep.to_dict(), order) or _other_modules(real, read_real(deep), order)
    return found or _Copies(real, architecture, tuple(copied)).problem()


def _other_values(before: Mapping[str, Any], after: Mapping[str, Any], order: Sequence[int]) -> Problem | None:
    """The first value of the config that copies would change, beside the number of layers."""
    layers = max(order) + 1
    lists = per_layer_lists(before, layers)
    for key, value in before.items():
        wanted = [lists[key][layer] for layer in order] + lists[key][layers:] if key in lists else value
        found = list(after.get(key) or ()) if key in lists else after.get(key)
        if found != wanted and (value, found) != (layers, len(order)):
            return Problem("list-by-number", "--layers", key=key)
    return None


def _other_modules(real: RealModel, deep: RealModel, order: Sequence[int]) -> Problem | None:
    """The first layer that would have other modules, settings or shapes than its source."""
    shapes, deep_shapes = _shapes(real), _shapes(deep)
    for position, layer in enumerate(order):
        if (real.forms[layer], shapes[layer]) != (deep.forms[position], deep_shapes[position]):
            return Problem("kind-by-number", "--layers", layer=layer, position=position)
    return None


def _shapes(real: RealModel) -> list[dict[str, Any]]:
    """Shapes of the tensors of each layer: sizes of a twin may be equal where those of the model differ."""
    layers = real.model.get_submodule(real.place.path).children()
    return [{name: tensor.shape for name, tensor in layer.state_dict().items()} for layer in layers]


@dataclass(frozen=True)
class _Copies:
    """Copies of layers, to be tried on a twin."""

    real: RealModel
    architecture: Architecture
    copied: tuple[int, ...]

    def problem(self) -> Problem | None:
        """Name the layers whose copies change the output of the twin, their kind, and how it changes."""
        if (together := self._failure(self.shown)) is None:
            return None
        alone = {layer: self._failure((layer,)) for layer in self.shown}
        loud = {layer: found for layer, found in alone.items() if found is not None} or {self.shown[0]: together}
        first = min(loud)
        # with all others between the same kinds
        layers = sorted({layer for alike in self.alike.values() if loud.keys() & {*alike} for layer in alike})
        values = text_config(self.real.config).to_dict()
        lists = per_layer_lists(values, self.real.place.count)
        words = [f"{key} {each[first]}" for key, each in lists.items() if isinstance(each[first], str)]
        layer = self.real.model.get_submodule(f"{self.real.place.path}.{first}")
        kind = f"{type(layer).__name__} with {', '.join(words)}" if words else type(layer).__name__
        return Problem("copies-change-output", f"--layers {format_layers(tuple(layers))}", loud[first], kind=kind)

    @cached_property
    def alike(self) -> dict[tuple[int, ...], list[int]]:
        """Copied layers by their kind and that of the layer after them."""
        alike: dict[tuple[int, ...], list[int]] = {}
        for layer in self.copied:
            alike.setdefault(self.real.kinds[layer : layer + 2], []).append(layer)
        return alike

    @cached_property
    def shown(self) -> tuple[int, ...]:
        """The first and the last of each of these: the last may be the one that many layers above read from."""
        return tuple(sorted({layer for alike in self.alike.values() for layer in (alike[0], alike[-1])}))

    @cached_property
    def chosen(self) -> tuple[int, ...]:
        """Layers of the twin: one of each kind, those shown, and those after them."""
        after = {layer + 1 for layer in self.shown if layer + 1 < self.real.place.count}
        return tuple(sorted({*self.real.kinds, *self.shown, *after}))

    @cached_property
    def stock(self) -> PreTrainedModel:
        """The twin without copies."""
        return build_twin(shrink_once(replace(self.real, chosen=self.chosen))[0])

    @cached_property
    def given(self) -> dict[torch.dtype, Given]:
        """Outputs of the twin without copies, by dtype."""
        return given_by(self.stock)

    def _failure(self, copied: Sequence[int]) -> Problem | None:
        """How copies of these layers change the output of the twin; None where they do not."""
        places = [self.chosen.index(layer) for layer in copied]
        deep, ids = self.deepened(places), token_ids(self.stock.config)
        found = (
            problem
            for dtype, given in self.given.items()
            for problem in differences(given, copy.deepcopy(deep).to(dtype), ids, str(dtype).removeprefix("torch."))
        )
        if (first := next(found, None)) is None:
            return None
        return self._first_other(deep, places, ids) or first

    def _first_other(self, deep: Any, copied: Sequence[int], ids: Tensor) -> Problem | None:
        """The first layer that gives another output than without copies; None where all give the same."""
        before, after = (_outputs(model, self.architecture.layers_path, ids) for model in (self.stock, deep))
        order = order_of(len(self.chosen), copied)
        for position, layer in enumerate(order):
            if not torch.equal(after[position], before[layer]):
                code = "copy-adds-output" if position and order[position - 1] == layer else "layer-gives-other"
                return Problem(code, layer=self.chosen[layer])
        return None

    def deepened(self, copied: Sequence[int]) -> Any:
        """The twin with copies of its layers, mute as planned."""
        stock = self.stock
        kinds = tuple(self.architecture.kind_of_layer[layer] for layer in self.chosen)
        facts = replace(self.architecture, kind_of_layer=kinds)
        # a twin has few layers, and a list that says nothing of layers may be as long
        keys = per_layer_lists(text_config(self.real.config).to_dict(), len(self.architecture.kind_of_layer))
        values = deepened_config(stock.config.to_dict(), build_depth_specs(facts, copied), facts, keys)
        del values[CONFIG_KEY]
        deep = build_model(type(stock.config).from_dict(values))
        numbering, weights = Numbering(facts.base_model, facts.layers, tuple(copied)), stock.state_dict()
        for layer in copied:
            path, mute = f"{facts.layers_path}.{layer}.", mute_values(self.architecture, self.chosen[layer])
            for name in [name for name in weights if name.startswith(path)]:
                inside, source = name.removeprefix(path), weights[name]
                value = mute.get(numberless(inside))
                weights[f"{path}{AFTER}{inside}"] = source if value is None else torch.full_like(source, value)
        deep.load_state_dict({numbering.stored(name): tensor for name, tensor in weights.items()})
        return deep


@torch.no_grad()
def _outputs(model: Any, layers: str, ids: Tensor) -> list[Any]:
    """The output of each layer of a model, in their order."""
    given: list[Any] = []
    noted = [
        layer.register_forward_hook(lambda module, inputs, output: given.append(first_tensor(output)))
        for layer in model.get_submodule(layers).children()
    ]
    model(input_ids=ids, use_cache=False)
    for hook in noted:
        hook.remove()
    return given
