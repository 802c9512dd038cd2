"""The expansion of a loaded model, for every method: freeze the rest, list its parameters, disable it.

An expanded class knows its own expansion. A model with duplicated layers has a stock class, and its config.json lists
the new layers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from scale_surgery.checkpoint.numbering import CONFIG_KEY, Numbering, numbering_of
from scale_surgery.errors import CheckpointError, Problem

if TYPE_CHECKING:
    from torch import Tensor, nn


class ExpansionParameter(NamedTuple):
    """A parameter of an expansion: its name in the model, its group (see settings.GROUPS), and the tensor."""

    name: str
    group: str
    parameter: nn.Parameter


def freeze_base(model: Any) -> Any:
    """Make only the expansion of a loaded model trainable. `from_pretrained` and trainers may reset it.

    Args:
        model: An expanded model of any method, as `from_pretrained` gives it.

    Returns:
        The same model.

    Raises:
        CheckpointError: If its config names no expansion.
    """
    if numbering_of(_specs(model)) is None:
        model.freeze_base()
        return model
    new = {id(part.parameter) for part in expansion_parts(model)}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in new)
    return model


def expansion_parts(model: Any) -> Iterator[ExpansionParameter]:
    """Yield the parameters of a loaded model's expansion, including frozen ones."""
    if (numbering := numbering_of(_specs(model))) is None:
        yield from (ExpansionParameter(*part) for part in model.expansion_parameters())
        return
    groups = _specs(model).get("groups") or {}
    for path, layer in new_layers(model, numbering).items():
        for name, parameter in layer.named_parameters():
            yield ExpansionParameter(f"{path}.{name}", group_of(name, groups), parameter)


def group_of(name: str, groups: Mapping[str, str]) -> str:
    """Return the group of a parameter of a copied layer: "attn", "ffn" or "norms"."""
    module = name.rpartition(".")[0]
    if "norm" in module.rpartition(".")[2].lower():
        return "norms"
    return next((group for inside, group in groups.items() if f"{module}.".startswith(f"{inside}.")), "norms")


def _specs(model: Any) -> Any:
    specs = getattr(model.config, CONFIG_KEY, None)
    if not specs:
        raise CheckpointError(Problem("model-without-expansion", "model", key=CONFIG_KEY))
    return specs


def new_layers(model: Any, numbering: Numbering) -> dict[str, Any]:
    """Return the copied layers of a loaded model, by their names in it."""
    path, layers = _layers(model, numbering)
    if numbering.new[-1] >= len(layers):
        place = f"config.json: {CONFIG_KEY}"
        raise CheckpointError(Problem("new-layer-out-of-range", place, layer=numbering.new[-1], layers=len(layers)))
    return {f"{path}.{position}": layers[position] for position in numbering.new}


def _layers(model: Any, numbering: Numbering) -> tuple[str, Any]:
    """Return the layers of a loaded model, and their name in it."""
    path = f"{numbering.base_model}.{numbering.layers}"
    path = path if hasattr(model, numbering.base_model.partition(".")[0]) else numbering.layers
    return path, model.get_submodule(path)


def base_states(model: Any, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the hidden states that also exist in the base.

    These are the input of each base layer and the output of the final norm.
    """
    numbering = numbering_of(getattr(model.config, CONFIG_KEY, None))
    if numbering is None:
        return states
    return tuple(state for position, state in enumerate(states) if position not in numbering.new)


@contextmanager
def expansion_disabled(model: Any) -> Iterator[None]:
    """Disable the expansion inside a `with` block. Duplicated layers return their input.

    Args:
        model: An expanded model of any method, as `from_pretrained` gives it. A KV cache belongs to
            the state in which it was filled.

    Raises:
        CheckpointError: If its config names no expansion.
    """
    if (numbering := numbering_of(_specs(model))) is None:
        with model.expansion_disabled():
            yield
        return
    copies = new_layers(model, numbering).values()
    before = [vars(layer).get("forward") for layer in copies]
    returns_tuple = [False]

    def look(_: Any, __: Any, output: Any) -> None:
        returns_tuple[0] = isinstance(output, tuple)

    def pass_on(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor | tuple[Tensor]:
        return (hidden_states,) if returns_tuple[0] else hidden_states

    for layer in copies:
        layer.forward = pass_on
    # the first layer is no copy, and what a model takes from a layer depends on its type
    looking = _layers(model, numbering)[1][0].register_forward_hook(look)
    try:
        yield
    finally:
        looking.remove()
        for layer, forward in zip(copies, before, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward


def train_in_float32(model: Any) -> None:
    """Keep the trained parameters in float32, and compute with them in their stored dtype."""
    import torch

    specs = _specs(model)
    numbering = numbering_of(specs)
    # our own modules cast their parameters; a copied stock layer needs cast parameters
    for layer in new_layers(model, numbering).values() if numbering is not None else ():
        dtypes = {name: parameter.dtype for name, parameter in layer.named_parameters()}
        if set(dtypes.values()) != {torch.float32}:
            _compute_in(layer, dtypes)
    # bfloat16 would lose an update of less than 1/256 of a number
    for part in expansion_parts(model):
        part.parameter.data = part.parameter.data.to(torch.float32)


def _compute_in(layer: Any, dtypes: dict[str, Any]) -> None:
    """Make a layer compute with its parameters cast to these dtypes."""
    from torch import nn
    from torch.func import functional_call

    stock: Any = type(layer)

    class Casting(nn.Module):
        """A wrapper through which functional_call reaches the stock forward. It is not part of the model."""

        def __init__(self, layer: Any) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, *args: Any, **options: Any) -> Any:
            return stock.forward(self.layer, *args, **options)

    # the cast is in the forward of a subclass, so that gradient checkpointing casts again when it repeats the forward
    @functools.wraps(stock.forward)
    def cast_forward(self: Any, *args: Any, **options: Any) -> Any:
        cast = {f"layer.{name}": parameter.to(dtypes[name]) for name, parameter in self.named_parameters()}
        return functional_call(Casting(self), cast, args, options)

    layer.__class__ = type(stock.__name__, (stock,), {"forward": cast_forward})
