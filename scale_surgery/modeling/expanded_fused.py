"""The fused form: base weight and blocks of each linear are one matrix, [[W, W12], [W21, W22]].

One product instead of four, for serving. Its sums run in another order than those of the blocks, so results are equal
up to rounding and no longer bit for bit, and nothing trains. What else keeps streams apart for the sake of bits does
not: heads attend at once, activations and norms inside a head are stock modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from .expanded_attention import ExpandedAttention
from .expanded_modules import (
    Blocks,
    ExpandedActivation,
    ExpandedHead,
    ExpandedHeadNorm,
    ExpandedModule,
    HeadBlocks,
    Layout,
    LinearBlocks,
    NormBlocks,
    expanded_class,
    stock_class,
)
from .expanded_paths import Paths


class FusedModule(ExpandedModule):
    """A module that reads streams where they lie."""

    def split(self, x: Tensor, layout: Layout) -> Sequence[Tensor]:
        return x.split_with_sizes(layout.widths_of(x.shape[-1]), dim=-1)


class FusedLinear(FusedModule):
    """A stock linear (or Conv1D) as wide as both streams together; the output lies section by section, base before up.

    One base stream and its up stream are one product. Where there are several base streams, the base's own gets W
    alone.
    """

    def make_layout(self, paths: Paths) -> Layout | None:
        return super().make_layout(paths) if len(paths.groups(self.place)) > 1 else None

    def through(self, run: Callable[[Tensor], Tensor], x: Tensor, layout: Layout) -> Tensor:
        return super().through(lambda base: self.part(base, is_up=False), x, layout)

    def widths(self) -> list[int]:
        """Widths of what it gives out, base and up in turn."""
        (blocks,) = self.expansions.values()
        ups = blocks.up_sections
        bases = self.sections or (len(self.rows()) - sum(ups),)
        return [width for pair in zip(bases, ups, strict=True) for width in pair]

    def rows(self) -> Tensor:
        """The weight, rows being outputs."""
        return self.weight if isinstance(self, nn.Linear) else self.weight.t()

    def part(self, x: Tensor, *, is_up: bool) -> Tensor:
        """Base or up part of what it gives for the first streams that it reads."""
        widths = self.widths()
        rows = self.rows()[:, : x.shape[-1]].split(widths)[is_up::2]
        biases = [None] * len(rows) if self.bias is None else self.bias.split(widths)[is_up::2]
        return concatenated([functional.linear(x, *pair) for pair in zip(rows, biases, strict=True)])


class FusedBlocks(Blocks):
    """Blocks that lie in the weight of their linear."""

    replaces_base = True

    def forward(self, base: Tensor, up: Tensor, y: Tensor | None, has_w12: bool) -> tuple[Tensor, Tensor | None]:
        x = torch.cat((base, up), dim=-1)
        if not has_w12:
            return y, self.stock.part(x, is_up=True) if any(self.up_sections) else None
        parts = self.stock.run_stock(x).split(self.stock.widths(), dim=-1)
        return concatenated(parts[::2]), concatenated(parts[1::2]) if any(self.up_sections) else None


class FusedNorm(FusedModule):
    """A split norm in which both streams are normalised by the kernel of torch, which keeps its sums in float32."""

    def through(self, run: Callable[[Tensor], Tensor], x: Tensor, layout: Layout) -> Tensor:
        if len(layout.groups) > 1:
            return super().through(run, x, layout)
        (base, up), (blocks,) = self.split(x, layout), layout.groups[0].blocks
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
        # a norm without a gain may have an epsilon that no config says
        y = run(base) if weight is None else normalised(blocks, base, weight, bias)
        return torch.cat((y, normalised(blocks, up, blocks.up_weight, blocks.up_bias)), dim=-1)


class FusedHead(ExpandedHead):
    """A head as wide as both streams together."""

    def make_layout(self, paths: Paths) -> Layout | None:
        return None

    def base_logits(self, base: Tensor, unsplit: Tensor) -> Tensor:
        return functional.linear(base, self.weight[:, : base.shape[-1]], self.bias)


class FusedHeadBlocks(HeadBlocks):
    """The up part of a head, which lies in its weight."""

    up_weight = None

    def forward(self, base: Tensor, up: Tensor, y: Tensor | None, has_w12: bool) -> tuple[Tensor, Tensor | None]:
        return y + functional.linear(up, self.stock.weight[:, -self.up_in :]), None


def concatenated(parts: Sequence[Tensor]) -> Tensor:
    """Parts side by side; a single one as it lies."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def normalised(blocks: NormBlocks, x: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
    """The norm of one stream."""
    if gain.dtype == x.dtype and not blocks.style.endswith("_plus_one"):
        return blocks.normalise(x, gain, bias)
    # half precision has too few bits for 1 + w
    return blocks.normalise(x.float(), gain.float(), None if bias is None else bias.float()).to(x.dtype)


def widen(module: nn.Module, inputs: int, outputs: int) -> None:
    """Give a stock linear (or Conv1D) so many more inputs and outputs; its tensors are zero until they are loaded."""
    is_linear = isinstance(module, nn.Linear)
    names = ("in_features", "out_features") if is_linear else ("nx", "nf")
    shape = [getattr(module, name) + width for name, width in zip(names, (inputs, outputs), strict=True)]
    for name, width in zip(names, shape, strict=True):
        setattr(module, name, width)
    module.weight = nn.Parameter(module.weight.new_zeros(shape[::-1] if is_linear else shape))
    if module.bias is not None:
        module.bias = nn.Parameter(module.bias.new_zeros(shape[1]))


def fuse(model: nn.Module, name: str, *, has_fused_head: bool) -> None:
    """Join the linears of a model with the blocks of its only expansion, in place.

    Args:
        model: The model; the tensors of its expansion are not yet loaded.
        name: Name of the expansion.
        has_fused_head: Whether its head is joined too.
    """
    for module in list(model.modules()):
        if isinstance(module, ExpandedAttention):
            module.is_split = False
        elif isinstance(module, (ExpandedActivation, ExpandedHeadNorm)):
            module.__class__ = stock_class(module)
            del module.expansions
        elif isinstance(module, ExpandedHead) and has_fused_head:
            put(module, name, FusedHead, FusedHeadBlocks)
        elif isinstance(module, ExpandedModule) and type(module).__bases__[0] is ExpandedModule:
            blocks = module.expansions._modules.get(name)
            if isinstance(blocks, LinearBlocks):
                put(module, name, FusedLinear, FusedBlocks)
            else:
                kind = FusedNorm if isinstance(blocks, NormBlocks) else FusedModule
                module.__class__ = expanded_class(kind, stock_class(module))


def put(module: nn.Module, name: str, kind: type, blocks: type) -> None:
    """Give a linear another class and, in place of blocks of its own, room for them in its weight."""
    before = module.expansions[name]
    module.expansions[name] = blocks(module, {}, before.up_in)
    module.expansions[name].up_sections = before.up_sections
    module.__class__ = expanded_class(kind, stock_class(module))
    widen(module, before.up_in, sum(before.up_sections))
