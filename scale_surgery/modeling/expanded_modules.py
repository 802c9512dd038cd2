"""Modules of an expanded model: stock modules that also carry an up stream.

An expanded model is a stock transformers model in which some modules were given a second class. Every
expanded module splits its input into the base part and the up part, calls the stock module's own forward
on the base part alone, computes the up part from the expansion blocks, and joins the two:

    [ y    ]   [ W    W12 ] [ x    ]      W    pretrained, frozen, used by the stock forward
    [ y_up ] = [ W21  W22 ] [ x_up ]      W12, W21, W22   expansion blocks (SCALE, arXiv 2511.03270, eq. 1)

Because the stock forward sees the same values in the same shapes as in the base model, its results are
the base model's, bit for bit. What is expanded, and how wide, stands in `config.scale_surgery`.
This file travels with the checkpoint: it opens no file, and needs only torch and transformers.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# bytes; kernels may treat rows that begin at a multiple of a vector register differently
ALIGNMENT = 64
EXPANSION_NAMES = ("w12", "w21", "w22", "up_weight", "up_bias")


def product(x: Tensor, block: Tensor, like: Tensor) -> Tensor:
    """Multiply by an expansion block in the block's dtype; the result has the dtype of `like`."""
    return functional.linear(x.to(block.dtype), block).to(like.dtype)


def join(base: Tensor, up: Tensor, sections: list[list[int]]) -> Tensor:
    """Join base and up outputs; a fused projection is joined section by section: q, q_up, k, k_up, ..."""
    if len(sections) == 1:
        return torch.cat((base, up), dim=-1)
    base_parts = base.split([size for size, _ in sections], dim=-1)
    up_parts = up.split([size for _, size in sections], dim=-1)
    return torch.cat([part for pair in zip(base_parts, up_parts, strict=True) for part in pair], dim=-1)


class ExpandedModule:
    """A stock module with an up stream; the second base class of every expanded module.

    Below the first collaborative layer nothing that trains reaches the base stream, so no gradient has to pass
    through it: there `base_detached` is set, and training costs what the up stream costs.
    """

    base_detached = False

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Split the last axis into base part and up part.

        The base part is a copy of its own, because kernels may choose their path by the strides of an operand.
        """
        base = x[..., : self.base_in]
        return (base.detach() if self.base_detached else base).clone(), x[..., self.base_in :]

    def add_parameter(self, name: str, *shape: int, dtype: str | None) -> None:
        """Add one expansion tensor, zero until it is loaded, in `dtype` or in the dtype of the stock weight."""
        weight = self.weight
        kind = getattr(torch, dtype) if dtype else weight.dtype
        self.register_parameter(name, nn.Parameter(weight.new_zeros(shape, dtype=kind)))

    def expansion_parameters(self) -> dict[str, nn.Parameter]:
        """The expansion tensors of this module by name."""
        own = self._parameters
        return {name: own[name] for name in EXPANSION_NAMES if own.get(name) is not None}


class ExpandedLinear(ExpandedModule):
    """A linear (or Conv1D) with expansion blocks; rows of a block are outputs, in both storage orders.

    `in_features` is [base, up], `out_features` one [base, up] for each section of the output. `w12` is there
    only in collaborative layers: in a preservation layer it is exactly zero by not existing.
    """

    def configure(self, in_features, out_features, collaborative, dtype):
        self.base_in, self.sections = in_features[0], out_features
        base_out, up_out = (sum(widths) for widths in zip(*out_features, strict=True))
        up_in = in_features[1]
        shapes = {
            "w12": (base_out, up_in if collaborative else 0),
            "w21": (up_out, in_features[0]),
            "w22": (up_out, up_in),
            "up_bias": (up_out,) if self.bias is not None else (0,),
        }
        for name, shape in shapes.items():
            if 0 in shape:
                self.register_parameter(name, None)
            else:
                self.add_parameter(name, *shape, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x_base, x_up = self.split(x)
        y_base = super().forward(x_base)
        y_up = self.forward_up(x_base, x_up, y_base)
        if self.w12 is not None:
            y_base = y_base + product(x_up, self.w12, y_base)
        return y_base if y_up is None else join(y_base, y_up, self.sections)

    def forward_up(self, x_base: Tensor, x_up: Tensor, like: Tensor) -> Tensor | None:
        """Up part of the output, W21 x + W22 x_up + bias, or None where the output is not widened."""
        if self.w21 is None:
            return None
        y_up = product(x_base, self.w21, like)
        if self.w22 is not None:
            y_up = y_up + product(x_up, self.w22, like)
        return y_up if self.up_bias is None else y_up + self.up_bias.to(like.dtype)


class ExpandedHead(ExpandedModule):
    """The head: logits = head x + head_up x_up, where head_up is `up_weight`, zero at first, never tied."""

    def configure(self, base, up, dtype):
        self.base_in = base
        self.add_parameter("up_weight", self.weight.shape[0], up, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x_base, x_up = self.split(x)
        logits = super().forward(x_base)
        return logits + product(x_up, self.up_weight, logits)


class ExpandedEmbedding(ExpandedModule):
    """An embedding with added columns, which take the same scale as the stock ones where there is one."""

    def configure(self, up, dtype):
        self.add_parameter("up_weight", self.weight.shape[0], up, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        base = super().forward(ids)
        up = functional.embedding(ids, self.up_weight, self.padding_idx).to(base.dtype)
        scale = getattr(self, "embed_scale", None)
        return torch.cat((base, up if scale is None else up * scale.to(up.dtype)), dim=-1)


class ExpandedNorm(ExpandedModule):
    """A split norm: each stream is normalised by its own statistics.

    `style` is "rms" (gain w), "rms_plus_one" (gain 1 + w) or "layer" (mean, variance, gain, bias).
    """

    def configure(self, base, up, style, epsilon, dtype):
        self.base_in, self.up_style, self.up_epsilon = base, style, epsilon
        self.add_parameter("up_weight", up, dtype=dtype)
        if getattr(self, "bias", None) is not None:
            self.add_parameter("up_bias", up, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x_base, x_up = self.split(x)
        y_base = super().forward(x_base)
        return torch.cat((y_base, self.forward_up(x_up).to(y_base.dtype)), dim=-1)

    def forward_up(self, x_up: Tensor) -> Tensor:
        """Norm of the up stream, computed in float32."""
        gain = self.up_weight.float()
        if self.up_style == "layer":
            bias = None if self._parameters.get("up_bias") is None else self.up_bias.float()
            return functional.layer_norm(x_up.float(), gain.shape, gain, bias, self.up_epsilon)
        if self.up_style == "rms_plus_one":
            gain = gain + 1.0
        return functional.rms_norm(x_up.float(), gain.shape, gain, self.up_epsilon)


class ExpandedHeadNorm(ExpandedModule):
    """A norm inside each head, shared by old and new heads; `heads` old ones come first on axis `axis`."""

    def configure(self, heads, axis):
        self.base_heads, self.head_axis = heads, axis

    def forward(self, x: Tensor) -> Tensor:
        sizes = [self.base_heads, x.shape[self.head_axis] - self.base_heads]
        # clone() keeps the order of strides, so the old heads lie in memory as they do in the base model
        old, new = x.split(sizes, self.head_axis)
        old = old.detach() if self.base_detached else old
        parts = [super(ExpandedHeadNorm, self).forward(part.clone()) for part in (old, new)]
        by_row = [part.movedim(self.head_axis, -2) for part in parts]
        return torch.cat(by_row, dim=-2).movedim(-2, self.head_axis)


class ExpandedActivation(ExpandedModule):
    """An activation run on each stream alone: vector and tail lanes of one kernel may round differently."""

    def configure(self, base):
        self.base_in = base

    def forward(self, x: Tensor) -> Tensor:
        x_base, x_up = x[..., : self.base_in], x[..., self.base_in :]
        # a chunk of a fused projection is strided in the base model too, and must stay so here
        x_base = x_base.detach() if self.base_detached else x_base
        x_base = x_base.clone() if x.is_contiguous() else x_base
        return torch.cat((super().forward(x_base), super().forward(x_up)), dim=-1)


class PassingModule(ExpandedModule):
    """A stock module at the border of the residual stream in a layer that was not chosen.

    It reads only the `base` features (None: reads something else) and writes `up` zeros, so the up stream
    passes through the layer's residual connection unchanged.
    """

    def configure(self, base, up):
        self.base_in, self.up_out = base, up

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x if self.base_in is None else self.split(x)[0])
        return functional.pad(y, (0, self.up_out)) if self.up_out else y


KINDS = {
    "linear": ExpandedLinear,
    "head": ExpandedHead,
    "embedding": ExpandedEmbedding,
    "norm": ExpandedNorm,
    "head_norm": ExpandedHeadNorm,
    "activation": ExpandedActivation,
    "passing": PassingModule,
}


@cache
def expanded_class(kind: type, stock: type) -> type:
    """The class of an expanded module: the stock class with one of KINDS before it."""
    return type(f"{stock.__name__}WithUpStream", (kind, stock), {"__module__": __name__})


def expand_module(module: nn.Module, kind: str, **sizes: Any) -> None:
    """Turn a stock module into an expanded one in place; its stock parameters keep their names."""
    module.__class__ = expanded_class(KINDS[kind], type(module))
    module.configure(**sizes)


class View:
    """An object seen with some values of its own; everything else is read live from the object."""

    def __init__(self, viewed: Any, own: dict[str, Any]) -> None:
        self.__dict__.update(own, viewed=viewed)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "viewed":
            raise AttributeError(name)
        return getattr(self.viewed, name)


def own_heads(states: Tensor, heads: int, is_eager: bool, is_detached: bool) -> tuple[Tensor, Tensor]:
    """Split queries, keys or values (b, heads, t, head size) into old and new heads.

    The old heads get the strides and the alignment that they have in the base model, because matrix kernels
    choose their path by both. In a cache, where each head lies by itself, nothing needs to be copied for the
    usual head sizes, except for eager attention, whose batched product would copy them into another order.
    """
    old, new = states[:, :heads], states[:, heads:]
    old = old.detach() if is_detached else old
    batch, _, rows, size = states.shape
    _, head_stride, row_stride, _ = states.stride()
    if row_stride > head_stride:
        # a head may be part of a fused projection, at some distance from its start
        start = states.storage_offset() % head_stride
        beside = states.new_empty(batch, rows, heads, head_stride)
        old = beside[..., start : start + size].transpose(1, 2).copy_(old)
    elif batch > 1 and (is_eager or head_stride * states.element_size() % ALIGNMENT):
        old = old.clone()
    return old, new


def split_attention(module, query, key, value, attention_mask, **kwargs):
    """Attention of old and new heads, one after the other, by the kernel that the model's config names."""
    config = module.config.viewed
    name = config._attn_implementation
    run = module.eager_attention if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
    seen = View(module, {"config": config})
    is_eager, is_detached = name == "eager", module.base_detached
    queries = own_heads(query, module.base_heads, is_eager, is_detached)
    keys = own_heads(key, module.base_kv_heads, is_eager, is_detached)
    values = own_heads(value, module.base_kv_heads, is_eager, is_detached)
    parts = [run(seen, *states, attention_mask, **kwargs) for states in zip(queries, keys, values, strict=True)]
    (old, old_weights), (new, new_weights) = parts
    weights = None if old_weights is None else torch.cat((old_weights, new_weights), dim=1)
    return torch.cat((old, new), dim=2), weights


SPLIT_ATTENTION = "scale_surgery_split_heads"
ALL_ATTENTION_FUNCTIONS.register(SPLIT_ATTENTION, split_attention)


def expand_attention(module: nn.Module, heads: int, kv_heads: int, attributes: dict, config: dict) -> None:
    """Tell an attention module of its new heads: what its stock forward reads from itself and from its config."""
    module.base_heads, module.base_kv_heads, module.base_detached = heads, kv_heads, False
    module.eager_attention = vars(import_module(type(module).__module__))["eager_attention_forward"]
    module.config = View(module.config, {**config, "_attn_implementation": SPLIT_ATTENTION})
    for name, value in attributes.items():
        setattr(module, name, value)


def expand_layer(layer: nn.Module, specs: dict[str, dict], collaborative_groups: list[str], dtype: str | None) -> None:
    """Expand the modules of one layer as `specs` say: module name to kind and sizes."""
    for name, spec in specs.items():
        sizes = {key: value for key, value in spec.items() if key != "group"}
        if spec["kind"] == "linear":
            sizes["collaborative"] = spec["group"] in collaborative_groups
        if spec["kind"] in ("linear", "norm"):
            sizes["dtype"] = dtype
        expand_module(layer.get_submodule(name), **sizes)


def expand_layers(base_model: nn.Module, plan: dict[str, Any]) -> None:
    """Expand the chosen layers, and let the up stream pass through the others."""
    collaborative = plan["collaborative"]
    for index, layer in enumerate(base_model.get_submodule(plan["layers"])):
        if index not in plan["expanded_layers"]:
            expand_layer(layer, plan["passing"], [], None)
            continue
        groups = collaborative["groups"] if index in collaborative["layers"] else []
        expand_layer(layer, plan["expanded"], groups, plan["dtype"])
        for name, spec in plan["attention"].items():
            expand_attention(layer.get_submodule(name), **spec)


def detach_base(model: nn.Module, base_model: nn.Module, plan: dict[str, Any]) -> None:
    """Let no gradient pass through the base stream where nothing that trains reaches it.

    That is below the first collaborative layer; without one it is the whole model, final norm and head included.
    """
    collaborative = plan["collaborative"]["layers"]
    layers = base_model.get_submodule(plan["layers"])
    parts = layers[: min(collaborative)] if collaborative else [model]
    for module in (module for part in parts for module in part.modules()):
        if hasattr(module, "base_detached"):
            module.base_detached = True


class ExpandedPreTrainedModel:
    """Mixin before a stock model class: expands its modules as `config.scale_surgery` says, and freezes the base."""

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        plan = config.scale_surgery
        base_model = getattr(self, plan["base_model"], self)
        for name, spec in plan["model"].items():
            own_dtype = {} if spec["kind"] == "passing" else {"dtype": plan["dtype"]}
            expand_module(base_model.get_submodule(name), **spec, **own_dtype)
        head = self.get_output_embeddings()
        if head is not None and plan["head"]:
            expand_module(head, **plan["head"], dtype=plan["dtype"])
        elif head is not None:
            # the last token's features are strided, and torch takes another kernel for them when a weight is frozen
            expand_module(head, "passing", base=head.weight.shape[1], up=0)
        expand_layers(base_model, plan)
        detach_base(self, base_model, plan)
        if plan["dtype"] == "float32":
            # new tensors that were asked for in float32 stay so when the base is loaded in half precision
            self._keep_in_fp32_modules_strict = set(self.expansion_names())
        self.post_init()
        self.freeze_base()

    # names on disk to names of modules, as patterns, where this transformers release renamed a module
    renamed_modules: dict[str, str] = {}

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """Load as transformers does, then freeze the base: loading itself resets `requires_grad`."""
        if cls.renamed_modules:
            kwargs.setdefault("key_mapping", cls.renamed_modules)
        loaded = super().from_pretrained(*args, **kwargs)
        (loaded[0] if isinstance(loaded, tuple) else loaded).freeze_base()
        return loaded

    def freeze_base(self) -> None:
        """Let the expansion tensors train, and nothing else."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.rsplit(".", 1)[-1] in EXPANSION_NAMES)

    def expansion_names(self) -> set[str]:
        """Last parts of the names of this model's expansion tensors."""
        last_parts = {name.rsplit(".", 1)[-1] for name, _ in self.named_parameters()}
        return last_parts.intersection(EXPANSION_NAMES)

    def resize_token_embeddings(self, *args, **kwargs):
        """Refuse: embedding and head have an up part that stock code does not resize."""
        raise NotImplementedError("Resize the base model's embeddings first, then expand it.")

    @torch.no_grad()
    def initialize_weights(self):
        """Initialise as the stock model does; expansion tensors that no file gave are zero.

        transformers lets the stock base model initialise its own modules, and it knows no expansion tensors.
        """
        missing = [
            parameter
            for module in self.modules()
            if isinstance(module, ExpandedModule) and not getattr(module, "_is_hf_initialized", False)
            for parameter in module.expansion_parameters().values()
            if not getattr(parameter, "_is_hf_initialized", False)
        ]
        super().initialize_weights()
        for parameter in missing:
            parameter.zero_()
