"""Modules of an expanded model: stock modules that also carry an up stream.

An expanded model is a stock transformers model in which some modules were given a second class. Every
expanded module splits its input into the base part and the up part, calls the stock module's own forward
on the base part alone, computes the up part from the expansion blocks, and joins the two:

    [ y    ]   [ W    W12 ] [ x    ]      W    pretrained, frozen, used by the stock forward
    [ y_up ] = [ W21  W22 ] [ x_up ]      W12, W21, W22   expansion blocks (SCALE, arXiv 2511.03270, eq. 1)

Because the stock forward sees the same values in the same shapes as in the base model, its results are
the base model's, bit for bit. What is expanded, and how wide, stands in `config.scale_surgery`.
This file travels with the checkpoint: it opens no file, and needs only torch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

EXPANSION_NAMES = ("w12", "w21", "w22", "up_weight", "up_bias")


def product(x: Tensor, block: Tensor, like: Tensor) -> Tensor:
    """Multiply by an expansion block in the block's dtype; the result has the dtype of `like`."""
    return functional.linear(x.to(block.dtype), block).to(like.dtype)


class AddProduct(torch.autograd.Function):
    """y + x block^T in the memory of y; through a view of y, autograd would copy the whole gradient."""

    @staticmethod
    def forward(context: Any, y: Tensor, x: Tensor, block: Tensor) -> Tensor:
        context.mark_dirty(y)
        context.save_for_backward(x, block)
        y.flatten(0, -2).addmm_(x.flatten(0, -2), block.t())
        return y

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, block = context.saved_tensors
        _, needs_x, needs_block = context.needs_input_grad
        x_gradient = gradient @ block if needs_x else None
        return gradient, x_gradient, gradient.flatten(0, -2).t() @ x.flatten(0, -2) if needs_block else None


def add_product(y: Tensor, x: Tensor, block: Tensor) -> Tensor:
    """Add the product by an expansion block to y: in place where nothing has to be cast, since logits are large."""
    is_cast = not y.dtype == x.dtype == block.dtype or torch.is_autocast_enabled(y.device.type)
    if is_cast or torch.compiler.is_compiling() or not y.is_contiguous():
        return y + product(x, block, y)
    return AddProduct.apply(y, x, block)


def join_streams(base: Tensor, up: Tensor) -> Tensor:
    """Join both streams; what training joins remembers them, so that the next module need not copy them out of it."""
    joined = torch.cat((base, up), dim=-1)
    if joined.requires_grad and not torch.compiler.is_compiling():
        joined.streams = (base, up, joined._version)
    return joined


def streams_of(x: Any) -> tuple[Tensor, Tensor] | None:
    """The streams that a tensor was joined from, or None where they are not known or it was changed since."""
    base, up, version = getattr(x, "streams", (None, None, None))
    return None if base is None or version != x._version else (base, up)


def join(base: Tensor, up: Tensor, sections: list[list[int]]) -> Tensor:
    """Join base and up outputs; a fused projection is joined section by section: q, q_up, k, k_up, ..."""
    if len(sections) == 1:
        return join_streams(base, up)
    base_parts = base.split([size for size, _ in sections], dim=-1)
    up_parts = up.split([size for _, size in sections], dim=-1)
    return torch.cat([part for pair in zip(base_parts, up_parts, strict=True) for part in pair], dim=-1)


class ExpandedModule:
    """A stock module with an up stream; the second base class of every expanded module.

    Below the first collaborative layer nothing that trains reaches the base stream, so no gradient has to pass
    through it: there `base_detached` is set, and training costs what the up stream costs. Where `is_enabled` is
    not set, the module is the stock module.
    """

    base_detached = False
    is_enabled = True
    # some modules see the strides that they see in the base model
    keeps_strides = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_enabled:
            return self.forward_expanded(x)
        # the last token's features are strided, and torch takes another kernel for them when a weight is frozen
        return self.forward_stock(x if self.keeps_strides else x.contiguous())

    def forward_stock(self, x: Tensor) -> Tensor:
        """The stock module's own forward."""
        return super().forward(x)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Split the last axis into base part and up part.

        The base part has memory of its own, because kernels may choose their path by the strides of an operand.
        """
        known = streams_of(x)
        base, up = known or (x[..., : self.base_in], x[..., self.base_in :])
        base = base.detach() if self.base_detached else base
        # a copy of the up part is what backward keeps, and not the joined tensor
        return (base, up) if known else (base.clone(), up.contiguous())

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

    groups = {"w12": "w12", "w21": "w21", "w22": "w22", "up_bias": "biases"}

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

    def forward_expanded(self, x: Tensor) -> Tensor:
        x_base, x_up = self.split(x)
        y_base = self.forward_stock(x_base)
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
            y_up = add_product(y_up, x_up, self.w22)
        return y_up if self.up_bias is None else y_up + self.up_bias.to(like.dtype)


class ExpandedHead(ExpandedModule):
    """The head: logits = head x + head_up x_up, where head_up is `up_weight`, zero at first, never tied."""

    groups = {"up_weight": "head"}

    def configure(self, base, up, dtype):
        self.base_in = base
        self.add_parameter("up_weight", self.weight.shape[0], up, dtype=dtype)

    def forward_expanded(self, x: Tensor) -> Tensor:
        x_base, x_up = self.split(x)
        return add_product(self.forward_stock(x_base), x_up, self.up_weight)


class ExpandedEmbedding(ExpandedModule):
    """An embedding with added columns, which take the same scale as the stock ones where there is one."""

    groups = {"up_weight": "embedding"}

    def configure(self, up, dtype):
        self.add_parameter("up_weight", self.weight.shape[0], up, dtype=dtype)

    def forward_expanded(self, ids: Tensor) -> Tensor:
        base = self.forward_stock(ids)
        up = functional.embedding(ids, self.up_weight, self.padding_idx).to(base.dtype)
        scale = getattr(self, "embed_scale", None)
        return torch.cat((base, up if scale is None else up * scale.to(up.dtype)), dim=-1)


class ExpandedNorm(ExpandedModule):
    """A split norm: each stream is normalised by its own statistics.

    `style` is "rms" (gain w), "rms_plus_one" (gain 1 + w) or "layer" (mean, variance, gain, bias).
    """

    groups = {"up_weight": "norms", "up_bias": "norms"}

    def configure(self, base, up, style, epsilon, dtype):
        self.base_in, self.up_style, self.up_epsilon = base, style, epsilon
        self.add_parameter("up_weight", up, dtype=dtype)
        if getattr(self, "bias", None) is not None:
            self.add_parameter("up_bias", up, dtype=dtype)

    def forward_expanded(self, x: Tensor) -> Tensor:
        x_base, x_up = self.split(x)
        y_base = self.forward_stock(x_base)
        return join_streams(y_base, self.forward_up(x_up).to(y_base.dtype))

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

    # its result lies in memory as its input does, and attention chooses its path by that
    keeps_strides = True

    def configure(self, heads, axis):
        self.base_heads, self.head_axis = heads, axis

    def forward_expanded(self, x: Tensor) -> Tensor:
        sizes = [self.base_heads, x.shape[self.head_axis] - self.base_heads]
        # clone() keeps the order of strides, so the old heads lie in memory as they do in the base model
        old, new = x.split(sizes, self.head_axis)
        old = old.detach() if self.base_detached else old
        parts = [self.forward_stock(part.clone()) for part in (old, new)]
        by_row = [part.movedim(self.head_axis, -2) for part in parts]
        return torch.cat(by_row, dim=-2).movedim(-2, self.head_axis)


class ExpandedActivation(ExpandedModule):
    """An activation run on each stream alone: vector and tail lanes of one kernel may round differently."""

    keeps_strides = True

    def configure(self, base):
        self.base_in = base

    def forward_expanded(self, x: Tensor) -> Tensor:
        return join_streams(*(self.forward_stock(part) for part in self.split(x)))

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.is_contiguous():
            return super().split(x)
        # a chunk of a fused projection is strided in the base model too, and must stay so here
        base = x[..., : self.base_in]
        return base.detach() if self.base_detached else base, x[..., self.base_in :]


class PassingModule(ExpandedModule):
    """A stock module at the border of the residual stream in a layer that was not chosen.

    It reads only the `base` features (None: reads something else) and writes `up` zeros, so the up stream
    passes through the layer's residual connection unchanged.
    """

    def configure(self, base, up):
        self.base_in, self.up_out = base, up

    def forward_expanded(self, x: Tensor) -> Tensor:
        y = self.forward_stock(x if self.base_in is None else self.split(x)[0])
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
