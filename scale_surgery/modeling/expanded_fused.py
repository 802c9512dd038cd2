"""Linears of the fused form: base weight and expansion blocks are one matrix, [[W, W12], [W21, W22]].

One product instead of four, for serving. Its sums run in another order than those of the blocks, so results are equal
up to rounding and no longer bit for bit, and nothing trains. This file travels with the checkpoint: it opens no file,
and needs only torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .expanded_modules import ExpandedModule, ExpandedNorm, PassingModule, expand_module
from .expanded_streams import Streams


class FusedLinear(ExpandedModule):
    """A stock linear (or Conv1D) as wide as both streams together; the output lies section by section, base before up.

    Where the model routes, the preserve path takes the columns that read its base stream, and of what they give the
    base part: W alone.
    """

    groups = {}

    def configure(self, in_features, out_features):
        self.base_in, self.sections = in_features[0], out_features
        widen(self, sum(in_features), sum(map(sum, out_features)))

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_expanded(x) if self.is_routed else self.forward_stock(x)

    def forward_streams(self, base: Tensor, up: Tensor) -> Streams:
        return self.separate(self.forward_stock(torch.cat((base, up), dim=-1)))

    def forward_preserve(self, base: Tensor, up: Tensor) -> Streams:
        columns = self.weight[:, : self.base_in] if isinstance(self, nn.Linear) else self.weight[: self.base_in].t()
        base_out = self.separate(nn.functional.linear(base, columns, self.bias))[0]
        return base_out, self.forward_streams(base, up)[1] if self.keeps_up else None

    def separate(self, y: Tensor) -> Streams:
        """Base part and up part of an output."""
        parts = y.split([width for section in self.sections for width in section], dim=-1)
        base, up = torch.cat(parts[::2], dim=-1), torch.cat(parts[1::2], dim=-1)
        return base, up if up.shape[-1] else None


class FusedNorm(ExpandedNorm):
    """A split norm in which both streams are normalised by the kernel of torch, which keeps its sums in float32."""

    def forward(self, x: Tensor) -> Tensor:
        if self.is_routed:
            return self.forward_expanded(x)
        base, up = x.split([self.base_in, x.shape[-1] - self.base_in], dim=-1)
        own = self._parameters
        weight, bias = own.get("weight"), own.get("bias")
        # a norm without a gain may have an epsilon that no config says
        y_base = self.forward_stock(base) if weight is None else self.normalise(base, weight, bias)
        return torch.cat((y_base, self.normalise(up, self.up_weight, own.get("up_bias"))), dim=-1)

    def normalise(self, x: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
        if not self.up_style.endswith("_plus_one"):
            return super().normalise(x, gain, bias)
        # half precision has too few bits for 1 + w
        return super().normalise(x.float(), gain.float(), bias).to(x.dtype)


class FusedPassing(PassingModule):
    """A stock module without blocks, which may read the base stream where it lies."""

    def base_part(self, x: Tensor) -> Tensor:
        return x[..., : self.base_in]


def widen(module: nn.Module, inputs: int, outputs: int) -> None:
    """Give a stock linear (or Conv1D) other widths; its parameters are zero until they are loaded."""
    is_linear = isinstance(module, nn.Linear)
    names = ("in_features", "out_features") if is_linear else ("nx", "nf")
    for name, width in zip(names, (inputs, outputs), strict=True):
        setattr(module, name, width)
    shape = (outputs, inputs) if is_linear else (inputs, outputs)
    module.weight = nn.Parameter(module.weight.new_zeros(shape))
    if module.bias is not None:
        module.bias = nn.Parameter(module.bias.new_zeros(outputs))


def fuse_layer(layer: nn.Module, specs: dict[str, dict]) -> None:
    """Widen the modules of one layer as `specs` say.

    Activations work element by element and norms inside a head head by head, so the stock ones do.
    """
    for name, spec in specs.items():
        if spec["kind"] == "linear":
            widths = {key: spec[key] for key in ("in_features", "out_features")}
            expand_module(layer.get_submodule(name), FusedLinear, **widths)
        elif spec["kind"] == "norm":
            fuse_norm(layer.get_submodule(name), spec)
        elif spec["kind"] == "passing":
            expand_module(layer.get_submodule(name), FusedPassing, base=spec["base"], up=spec["up"])


def fuse_norm(norm: nn.Module, spec: dict[str, Any]) -> None:
    """Let a stock norm normalise both streams."""
    expand_module(norm, FusedNorm, **{key: value for key, value in spec.items() if key != "kind"}, dtype=None)
