"""Fused models: a stock model, widened in place, in which base weights and blocks of an expansion are one matrix.

    [ W    W12 ]      each linear is a stock one with more inputs and outputs: one product where the expanded model has
    [ W21  W22 ]      four. Its sums run in another order, so results are those of the blocks up to rounding

Nothing but sizes differs from the stock model, so that a server which replaces linears, embedding, head and attention
by its own can serve it. What cannot be one wide module is a small class before the stock one:

    Split       a norm: of the base stream by the stock module, of the up stream beside it by its own statistics
    Narrow      a module that reads the base stream alone, or beside whose output zeros stand
    Entering    the first expanded layer, if the embedding has no up stream: it begins as zeros
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .configuration_fused import config_of
from .configuration_scale import find_stock_class
from .expanded_stock import (
    StrictlyLoaded,
    View,
    adds_features,
    find_base_model,
    find_module,
    make_model_class,
    normalise,
    padded,
    specs_of,
    wide_features,
)


class FusedPreTrainedModel(StrictlyLoaded):
    """Mixin before a stock model class: builds the stock model, and widens it as `config.scale_surgery` says.

    Base and expansion are one matrix in each linear, so the expansion cannot be switched off, and nothing trains.
    `scale-surgery merge FUSED --to blocks` writes the expanded model again.
    """

    is_fused = True

    def __init__(self, config, *args, **kwargs):
        super().__init__(config.stock_config(), *args, **kwargs)
        # that of every module inside
        self.stock_config, self.config = self.config, config
        config._attn_implementation = self.stock_config._attn_implementation
        widen_model(self, config.scale_surgery)
        self.freeze_base()

    def set_attn_implementation(self, *args, **kwargs):
        """As transformers, for the modules inside too."""
        super().set_attn_implementation(*args, **kwargs)
        self.stock_config._attn_implementation = self.config._attn_implementation


def widen_model(model: nn.Module, specs: dict[str, Any]) -> None:
    """Widen a stock model in place; new tensors are zero until they are loaded.

    Args:
        model: The model.
        specs: What config.json says under `scale_surgery`.
    """
    facts, (plan,) = specs["base"], specs["expansions"]
    base_model = find_base_model(model, facts["base_model"])
    layers, up = base_model.get_submodule(facts["layers"]), plan["widths"]["up_width"]
    first, last = plan["first_wide_layer"], facts["last"]
    if up and first >= 0:
        become(layers[first], Entering, up_width=up)
    for name, spec in plan["model"].items():
        if find_module(base_model, name) is model.get_input_embeddings():
            widen_embedding(model.get_input_embeddings(), up if first < 0 else 0)
        elif first < 0 or name == last:
            widen_module(base_model, name, spec, up)
    for index in range(max(first, 0), len(layers)):
        of_layer, is_expanded = specs_of(plan, index), index in plan["expanded_layers"]
        for name, spec in of_layer["expanded" if is_expanded else "passing"].items():
            widen_module(layers[index], name, spec, up)
        for name, heads in of_layer["attention"].items() if is_expanded else ():
            attention = find_module(layers[index], name)
            vars(attention).update(heads["attributes"])
            if heads["config"]:
                attention.config = View(attention.config, heads["config"])
    if plan["head"] and (head := model.get_output_embeddings()) is not None:
        widen_linear(head, up, 0)
    if up and adds_features(base_model):

        def widen_features(features: Tensor, layer: int) -> Tensor:
            return padded(features, up if layer >= first else 0)

        def hook(module: nn.Module, args: tuple, inputs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            return args, wide_features(inputs, widen_features)

        base_model.register_forward_pre_hook(hook, with_kwargs=True)


def widen_module(parent: nn.Module, name: str, spec: dict[str, Any], up: int) -> None:
    """Widen a module of a stock model.

    Args:
        parent: The module that its name begins in.
        name: Its name.
        spec: What config.json says of it.
        up: Width of the up stream.
    """
    module, kind = find_module(parent, name), spec["kind"]
    if kind == "linear":
        widen_linear(module, spec["in_features"][1], sum(width for _, width in spec["out_features"]))
    elif kind == "norm":
        has_bias = getattr(module, "bias", None) is not None
        become(module, Split, style=spec["style"], epsilon=spec["epsilon"])
        like = next(module.parameters(), torch.empty(()))
        module.up_weight = nn.Parameter(like.new_zeros(spec["up"]))
        module.up_bias = nn.Parameter(like.new_zeros(spec["up"])) if has_bias else None
    elif kind in ("passing", "padding"):
        reads = spec.get("base")
        if isinstance(module, (nn.Linear, Conv1D)):
            widen_linear(module, 0 if reads is None else up, spec["up"])
        else:
            become(module, Narrow, base_width=reads, up_width=spec["up"])


def widen_embedding(module: nn.Embedding, columns: int) -> None:
    """Give an embedding so many more columns."""
    module.embedding_dim += columns
    module.weight = nn.Parameter(module.weight.new_zeros(module.num_embeddings, module.embedding_dim))


def widen_linear(module: Any, inputs: int, outputs: int) -> None:
    """Give a linear (or Conv1D) so many more inputs and outputs."""
    is_linear = isinstance(module, nn.Linear)
    names = ("in_features", "out_features") if is_linear else ("nx", "nf")
    shape = [getattr(module, name) + width for name, width in zip(names, (inputs, outputs), strict=True)]
    vars(module).update(zip(names, shape, strict=True))
    module.weight = nn.Parameter(module.weight.new_zeros(shape[::-1] if is_linear else shape))
    if module.bias is not None:
        module.bias = nn.Parameter(module.bias.new_zeros(shape[1]))


class Split:
    """A norm of a base stream, and of the up stream beside it by its own statistics."""

    def forward(self, x: Tensor) -> Tensor:
        up_width = len(self.up_weight)
        base, up = x[..., :-up_width], x[..., -up_width:]
        bias = None if self.up_bias is None else self.up_bias.float()
        y_up = normalise(up.float(), self.style, self.epsilon, self.up_weight.float(), bias)
        y = super().forward(base)
        return torch.cat((y, y_up.to(y.dtype)), dim=-1)


class Narrow:
    """A module that reads only the base stream, of `base_width`, or gives `up_width` zeros beside its output."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        base = x if self.base_width is None else x[..., : self.base_width]
        return padded(super().forward(base, *args, **kwargs), self.up_width)


class Entering:
    """A layer before which the up stream begins, as zeros."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(padded(hidden_states, self.up_width), *args, **kwargs)


def become(module: nn.Module, kind: type, **values: Any) -> None:
    """Put a class before that of a module, in place, and give it values."""
    module.__class__ = class_of(kind, type(module))
    vars(module).update(values)


@cache
def class_of(kind: type, stock: type) -> type:
    """A stock class with one of this file before it."""
    return type(f"{kind.__name__}{stock.__name__}", (kind, stock), {"__module__": __name__})


def model_of(stock: type, stock_config: type, module: str = "") -> type:
    """The fused form of a stock model.

    Args:
        stock: Stock model class.
        stock_config: Configuration class of the base model.
        module: Where the class is found if not here, and that of its configuration.

    Returns:
        The class.
    """
    return _make_model(stock, stock_config, config_of(stock_config, module), module or __name__)


@cache
def _make_model(stock: Any, stock_config: type, config: type, module: str) -> type:
    attributes = {"config_class": config, "__module__": module, "__doc__": FusedPreTrainedModel.__doc__}
    return make_model_class("Fused", FusedPreTrainedModel, stock, stock_config, **attributes)


def __getattr__(name: str) -> Any:
    class_name, _, config = name.partition("_of_")
    stock = find_stock_class(class_name, PreTrainedModel, __name__, "Fused")
    config_class = find_stock_class(f"Fused{config}", PretrainedConfig, __name__, "Fused") if config else None
    return model_of(stock, config_class or stock.config_class)
