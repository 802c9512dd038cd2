"""Fused models: a stock model, widened in place, in which base weights and blocks of an expansion are one matrix.

    [ W    W12 ]      each linear is a stock one with more inputs and outputs: one product, where the expanded model has
    [ W21  W22 ]      four. Its sums run in another order, so results are those of the blocks up to rounding

Only sizes differ from the stock model, so a server that replaces linears, embedding, head and attention by its own can
serve it. Modules that need more than another size get a small class before the stock one:

    Split       a norm: of the base stream by the stock module, of the up stream beside it by its own statistics
    Narrow      a module that reads the base stream alone, or has zeros beside its output
    Entering    a layer before which the up stream enters, as zeros, or two paths fork
    Shared      an embedding that is also the head: [W | the head's up part | its own up part]
    Padding     the last norm before such a head: zeros for the columns that only the embedding has

With a cosine router, two paths run side by side from the first layer with W12 on: [p, p_up | a, a_up]. Their heads
attend in one call. A linear becomes two (`PathLinear`), of base streams and of up streams, since W12 acts on the second
path alone. The last norm decides (`Deciding`): with G = [W b]'[W b] of the base's head, the cosine of the logits of p
and a is p'Ga / sqrt(p'Gp a'Ga). The mean of features gives the mean of logits, which are linear in them.

A linear that reads its up stream through a gate also becomes two, and so do its neighbours, since servers treat modules
of one class alike. The gate of the head is in the last norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from .configuration_fused import config_of

# transformers 4 copies the files that this one imports itself, and no others
from .configuration_scale import find_stock_class  # noqa: F401
from .expanded_releases import find_cache  # noqa: F401
from .expanded_stock import (
    StrictlyLoaded,
    View,
    adds_features,
    find_base_model,
    find_module,
    find_stock_model,
    in_float32,
    make_model_class,
    normalise,
    padded,
    specs_of,
    through_gate,
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
        # the configuration of all modules inside
        self.stock_config, self.config = self.config, config
        config._attn_implementation = self.stock_config._attn_implementation
        sizes = {name for name in config.scale_surgery["stock"] if hasattr(self.stock_config, name)}
        # stock code may read them by a common name
        sizes |= {name for name, attribute in self.stock_config.attribute_map.items() if attribute in sizes}
        self.stock_sizes = {name: getattr(self.stock_config, name) for name in sizes}
        widen_model(self, config.scale_surgery)
        if "gram" in config.scale_surgery:
            # half precision has too few bits for a decision
            self._keep_in_fp32_modules_strict = {*(self._keep_in_fp32_modules_strict or ()), "gram"}
        # a layer stays on one device, also under the new name of its class
        layers = (type(module).__name__ for module in self.modules() if isinstance(module, Entering))
        self._no_split_modules = [*(self._no_split_modules or ()), *layers]
        self.freeze_base()

    @contextmanager
    def use_threshold(self, threshold: float) -> Iterator[None]:
        """Let the router decide by another cosine inside a `with` block."""
        norms = [module for module in self.modules() if isinstance(module, Deciding)]
        before = [norm.threshold for norm in norms]
        for norm in norms:
            norm.threshold = threshold
        try:
            yield
        finally:
            for norm, stored in zip(norms, before, strict=True):
                norm.threshold = stored

    def set_attn_implementation(self, *args, **kwargs):
        """Set it as transformers does, for the modules inside too."""
        super().set_attn_implementation(*args, **kwargs)
        self.stock_config._attn_implementation = self.config._attn_implementation


def widen_model(model: nn.Module, specs: dict[str, Any]) -> None:
    """Widen a stock model in place; new tensors are zero until they are loaded.

    Args:
        model: The model.
        specs: The entry `scale_surgery` of config.json.
    """
    facts, (plan,) = specs["base"], specs["expansions"]
    base_model = find_base_model(model, facts["base_model"])
    layers, up = base_model.get_submodule(facts["layers"]), plan["widths"]["up_width"]
    first, fork, embedding = plan["first_wide_layer"], plan["fork"], model.get_input_embeddings()
    fork = len(layers) if fork is None else fork
    for index in {first, fork}.intersection(range(len(layers))):
        become(layers[index], Entering, up_width=up * (index == first), path_count=1 + (index == fork))
    for index in range(max(first, 0), len(layers)):
        widen_layer(layers[index], specs, index, has_two_paths=index >= fork)
    own = plan["own_columns"]
    if own is None and first < 0:
        widen_embedding(embedding, up)
    elif own is not None:
        widen_embedding(embedding, up + own)
        become(embedding, Shared, widths=[facts["hidden"], up, own], zeros=up - own if first < 0 else 0)
    for name, spec in plan["model"].items():
        if find_module(base_model, name) is embedding:
            continue
        if first < 0 or name == facts["last"]:
            widen_module(base_model, name, spec, 1 + (name == facts["last"] and fork < len(layers)), up)
    head = model.get_output_embeddings()
    # a server has a head of its own, so the gate is in the last norm
    if plan.get("variant") == "gated" and up and plan["head"]:
        add_gate(find_module(base_model, facts["last"]), facts["hidden"] + up)
    if fork < len(layers):
        decide(find_module(base_model, facts["last"]), specs, up)
    if own:
        become(find_module(base_model, facts["last"]), Padding, zeros=own)
    if up and head is not None:
        widen_linear(head, up + (own or 0), 0)
        if own is not None:
            head.weight = embedding.weight
    if up and adds_features(base_model):

        def widen_features(features: Tensor, layer: int) -> Tensor:
            wide = padded(features, up if layer >= first else 0)
            return torch.cat((wide, wide), dim=-1) if layer >= fork else wide

        def hook(module: nn.Module, args: tuple, inputs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            return args, wide_features(inputs, widen_features)

        base_model.register_forward_pre_hook(hook, with_kwargs=True)


def widen_layer(layer: nn.Module, specs: dict[str, Any], index: int, *, has_two_paths: bool) -> None:
    """Widen the modules of a layer, and set the number of heads of its attention."""
    facts, (plan,) = specs_of(specs["base"], index), specs["expansions"]
    is_expanded, paths = index in plan["expanded_layers"], 1 + has_two_paths
    modules = specs_of(plan, index)["expanded" if is_expanded else "passing"]
    w12_groups = plan["collaborative"]["groups"] if index in plan["collaborative"]["layers"] else ()
    gated_groups = w12_groups if plan.get("variant") == "gated" and is_expanded else ()
    # both of two paths pass through every module
    for name in facts["modules"] | modules if has_two_paths else modules:
        spec = facts["modules"].get(name, {}) | modules.get(name, {})
        is_gated = modules.get(name, {}).get("group") in gated_groups
        widen_module(layer, name, spec, paths, plan["widths"]["up_width"], is_gated=is_gated)
        if is_gated and spec["in_features"][1]:
            add_gate(find_module(layer, name), sum(spec["in_features"]))
    heads = facts["attention"] | (specs_of(plan, index)["attention"] if is_expanded else {})
    for name, spec in heads.items() if is_expanded or has_two_paths else ():
        attention = find_module(layer, name)
        vars(attention).update({key: paths * value for key, value in spec["attributes"].items()})
        if spec["config"]:
            attention.config = View(attention.config, {key: paths * value for key, value in spec["config"].items()})


def widen_module(
    parent: nn.Module, name: str, spec: dict[str, Any], paths: int, up: int, *, is_gated: bool = False
) -> None:
    """Widen a module of a stock model.

    Args:
        parent: The module that its name begins in.
        name: Its name.
        spec: Its entry in config.json.
        paths: How many paths pass through it.
        up: Width of the up stream.
        is_gated: Whether a linear or a neighbour of it reads its up stream through a gate.
    """
    module, kind = find_module(parent, name), spec["kind"]
    if kind in ("activation", "head_norm"):
        return
    if kind == "norm":
        split(module, spec, paths)
    elif not isinstance(module, (nn.Linear, Conv1D)):
        become(module, Narrow, base_width=spec.get("base"), up_width=spec["up"], path_count=paths)
    else:
        inputs, sections = linear_widths(module, spec, up)
        if paths == 1 and not is_gated:
            widen_linear(module, inputs[1], sum(new for _, new in sections))
        else:
            owner = parent.get_submodule(name.rpartition(".")[0])
            made = PathLinear(module, inputs, sections, paths, reads_up=kind == "linear" and inputs[1] > 0)
            setattr(owner, name.rpartition(".")[2], made)
            if not isinstance(owner, TwoPaths):
                become(owner, TwoPaths)


def linear_widths(module: nn.Module, spec: dict[str, Any], up: int) -> tuple[tuple[int, int], list[tuple[int, int]]]:
    """Return base and up width of the input of a linear, and of each section of its output."""
    if spec["kind"] == "linear":
        return tuple(spec["in_features"]), [tuple(widths) for widths in spec["out_features"]]
    reads, writes = sizes_of(module)
    sections = spec.get("sections") or [writes]
    return (reads, 0 if spec["base"] is None else up), [(width, spec["up"]) for width in sections]


def sizes_of(linear: Any) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a linear (or Conv1D)."""
    return (linear.in_features, linear.out_features) if isinstance(linear, nn.Linear) else (linear.nx, linear.nf)


def widen_embedding(module: nn.Embedding, columns: int) -> None:
    """Add columns to an embedding."""
    module.embedding_dim += columns
    module.weight = nn.Parameter(module.weight.new_zeros(module.num_embeddings, module.embedding_dim))


def widen_linear(module: Any, inputs: int, outputs: int) -> None:
    """Add inputs and outputs to a linear (or Conv1D)."""
    is_linear = isinstance(module, nn.Linear)
    shape = [width + new for width, new in zip(sizes_of(module), (inputs, outputs), strict=True)]
    vars(module).update(zip(("in_features", "out_features") if is_linear else ("nx", "nf"), shape, strict=True))
    module.weight = nn.Parameter(module.weight.new_zeros(shape[::-1] if is_linear else shape))
    if module.bias is not None:
        module.bias = nn.Parameter(module.bias.new_zeros(shape[1]))


def add_gate(module: nn.Module, width: int) -> None:
    """Give a module a gate that reads `width` features of both streams; see `gate_scores`."""
    like = next(module.parameters())
    module.gate = nn.Parameter(like.new_zeros(width + 1))


class TwoPaths:
    """A module with a `PathLinear`; a server that rewrites modules by their class must not take it for a stock one."""


class PathLinear(nn.Module):
    """A linear for all paths: [W; W21] reads their base streams, [W12; W22] their up streams.

    W12 writes on the last path alone. The order of the output is by section, then by path, then base before up.
    """

    def __init__(
        self,
        stock: nn.Module,
        inputs: tuple[int, int],
        sections: list[tuple[int, int]],
        paths: int,
        *,
        reads_up: bool,
    ):
        super().__init__()
        self.path_count, self.inputs = paths, list(inputs)
        self.widths = [width for section in sections for width in section]
        self.base = copy(stock)
        self.base._parameters = dict(stock._parameters)
        widen_linear(self.base, 0, sum(self.widths) - sizes_of(stock)[1])
        like = {"device": stock.weight.device, "dtype": stock.weight.dtype}
        self.up = nn.Linear(inputs[1], sum(self.widths), bias=False, **like) if reads_up else None

    @property
    def weight(self) -> Tensor:
        """Return the weight that stock code initialises."""
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        base, up = torch.stack(x.chunk(self.path_count, dim=-1)).split(self.inputs, dim=-1)
        outputs = self.base(base).split(self.widths, dim=-1)
        if self.up is not None:
            added = self.up(through_gate(self, base, up, up)).split(self.widths, dim=-1)
            outputs = [
                y + new if place % 2 else torch.cat((y[:-1], y[-1:] + new[-1:]))
                for place, (y, new) in enumerate(zip(outputs, added, strict=True))
            ]
        pairs = zip(outputs[::2], outputs[1::2], strict=True)
        return torch.cat([part[path] for pair in pairs for path in range(self.path_count) for part in pair], dim=-1)


def split(module: nn.Module, spec: dict[str, Any], paths: int) -> None:
    """Make a norm one of the streams side by side."""
    has_bias = getattr(module, "bias", None) is not None
    become(module, Split, style=spec["style"], epsilon=spec["epsilon"], up_width=spec["up"], path_count=paths)
    like = next(module.parameters(), torch.empty(()))
    module.up_weight = nn.Parameter(like.new_zeros(spec["up"]))
    module.up_bias = nn.Parameter(like.new_zeros(spec["up"])) if has_bias else None


class Split:
    """A norm of each path's base stream, and of the up stream beside it by its own statistics."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.up_bias is None else self.up_bias.float()
        streams = []
        for path in x.chunk(self.path_count, dim=-1):
            y = super().forward(path[..., : -self.up_width])
            up = path[..., -self.up_width :].float()
            y_up = normalise(up, self.style, self.epsilon, self.up_weight.float(), bias).to(y.dtype)
            streams += [y, through_gate(self, y, y_up, y_up)]
        return torch.cat(streams, dim=-1)


class Narrow:
    """A module that reads only the base stream of each path, of `base_width`, or gives `up_width` zeros beside it."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # an input that is no hidden state, such as token ids, is one path
        paths = x.chunk(self.path_count, dim=-1) if self.path_count > 1 else (x,)
        bases = [path if self.base_width is None else path[..., : self.base_width] for path in paths]
        outputs = [padded(super(Narrow, self).forward(base, *args, **kwargs), self.up_width) for base in bases]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


class Shared:
    """An embedding that is also the head; the columns of the head's up part are removed, or replaced by zeros."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        base, _, up = super().forward(*args, **kwargs).split(self.widths, dim=-1)
        return padded(torch.cat((base, up), dim=-1), self.zeros)


class Padding:
    """A module with zeros beside its output."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return padded(super().forward(*args, **kwargs), self.zeros)


class Entering:
    """A layer before which the up stream enters, as zeros, or two paths fork, which are the same until then."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        wide = padded(hidden_states, self.up_width)
        wide = torch.cat((wide, wide), dim=-1) if self.path_count > 1 else wide
        return super().forward(wide, *args, **kwargs)


class Deciding:
    """The last norm of a model with a cosine router; it returns the features of each token on its chosen path."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = super().forward(x).chunk(2, dim=-1)
        width = first.shape[-1] - self.head_up_width
        p, a = first[..., :width], second[..., :width]
        chosen = self.cosine(p, a) > self.threshold
        preserved = (
            padded(p, self.head_up_width) if self.strict else torch.cat(((p + a) / 2, first[..., width:]), dim=-1)
        )
        return torch.where(chosen, preserved, second)

    def cosine(self, p: Tensor, a: Tensor) -> Tensor:
        """Compute the cosine of the logits of two base streams (b, t, 1), float32."""
        p, a = p.float(), a.float()
        if len(self.gram) > p.shape[-1]:
            # the bias of the head
            p, a = (functional.pad(stream, (0, 1), value=1.0) for stream in (p, a))
        # a cast of the whole model may have changed its dtype
        gram = self.gram.float()
        with in_float32(p.device):
            of_p, of_a = p @ gram, a @ gram
        lengths = (of_p * p).sum(-1, keepdim=True) * (of_a * a).sum(-1, keepdim=True)
        return ((of_p * a).sum(-1, keepdim=True) * torch.rsqrt(lengths)).clamp(-1, 1)


def decide(norm: nn.Module, specs: dict[str, Any], up: int) -> None:
    """Let the last norm decide between two paths."""
    router, size = specs["router"], specs["gram"]
    if up == 0:
        become(norm, Narrow, base_width=None, up_width=0, path_count=2)
    become(norm, Deciding, threshold=router["threshold"], strict=router["strict"], head_up_width=up)
    norm.gram = nn.Parameter(torch.zeros(size, size, dtype=torch.float32))


def become(module: nn.Module, kind: type, **values: Any) -> None:
    """Put a class before that of a module, in place, and give it values."""
    module.__class__ = class_of(kind, type(module))
    vars(module).update(values)


@cache
def class_of(kind: type, stock: type) -> type:
    """Make a stock class with one of this file before it."""
    return type(f"{kind.__name__}{stock.__name__}", (kind, stock), {"__module__": __name__})


def model_of(stock: type, stock_config: type, module: str = "") -> type:
    """Make the fused form of a stock model class.

    Args:
        stock: Stock model class.
        stock_config: Configuration class of the base model.
        module: Module of the class if not this one, and of its configuration.
    """
    return _make_model(stock, stock_config, config_of(stock_config, module), module or __name__)


@cache
def _make_model(stock: Any, stock_config: type, config: type, module: str) -> type:
    @wraps(stock.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen = object.__new__(inside)
        seen.__dict__ = vars(self)
        return stock.forward(seen, *args, **kwargs)

    attributes = {"config_class": config, "__module__": module, "__doc__": FusedPreTrainedModel.__doc__}
    made = make_model_class("Fused", FusedPreTrainedModel, stock, stock_config, forward=forward, **attributes)
    # the same model for its stock forward, under the same name, by which transformers knows classes
    inside = type(made.__name__, (made,), {"config": property(inner_config), "__module__": module})
    return made


def inner_config(model: Any) -> Any:
    """Make a view of the configuration of a fused model with the sizes of the base, with which stock code computes."""
    values = vars(model)
    return View(values["config"], values["stock_sizes"])


def __getattr__(name: str) -> Any:
    return model_of(*find_stock_model(name, __name__, "Fused"))
