"""Modules of an expanded model: stock modules through which all chosen paths pass.

A stock module gets a second class. It splits the input into streams (see `expanded_paths`), runs the stock forward once
on each base stream, lets each expansion compute its up stream, and joins the results. The stock forward sees the same
values in the same shapes as in the base model, so its results are the base model's, bit for bit. W12 x_up is added to a
base stream that belongs to its expansion, and to no other.

Attention is an exception: it runs once, and inside the stock forward the heads of each path attend by themselves. The
base's heads get the shapes, the strides and the alignment that they have in the base model. The stock forward runs on a
copy of its module with the number of all heads; the module itself does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .expanded_blocks import (
    CACHE_LINE,
    Blocks,
    DenseBlocks,
    EmbeddingBlocks,
    GrownBlocks,
    HeadBlocks,
    LinearBlocks,
    NormBlocks,
    PassingBlocks,
    SameBlocks,
    aligned_contiguous,
    dense,
    join_streams,
    product,
    streams_of,
)
from .expanded_paths import ActiveExpansions, Group, Paths, memo
from .expanded_releases import CACHES_OF_MODULES
from .expanded_shapes import shapes_of
from .expanded_stock import View, twin

# a logit so far below the largest has probability 0: NEAR still lets a router add to it in float32; FAR, without a
# router, holds even if the stock model scales its logits down afterwards
NEAR, FAR = 200, 30_000


class Layout(NamedTuple):
    """The streams of the chosen paths in the input of a module, in their order."""

    # each group with the blocks of its up streams; None if the expansion adds nothing to the module
    groups: tuple[tuple[Group, tuple[Blocks | None, ...]], ...]
    up_in: tuple[int | None, ...]  # widths of up streams; None for base streams, which are equally wide
    widths: dict[int, list[int]]  # memo of `widths_of`

    def widths_of(self, width: int) -> list[int]:
        """Return the widths of all streams that the module reads, from their sum."""
        # for a single token, working them out costs as much as a small product
        return memo(self.widths, width, self._widths_of)

    def _widths_of(self, width: int) -> list[int]:
        ups = [up for up in self.up_in if up is not None]
        base = (width - sum(ups)) // (len(self.up_in) - len(ups))
        return [base if up is None else up for up in self.up_in]


class ExpandedModule:
    """Mixin before the stock class of a module through which all chosen paths pass.

    Attributes:
        active: The active expansions of the model.
        place: Number of its layer; -1 before the first one, and the number of layers after the last.
        expansions: Blocks by the name of their expansion; without an entry if it adds nothing to the module.
        layouts: Layouts of its input by paths; None if the stock module runs alone.
        sections: Widths of the parts of a fused projection; otherwise empty.
    """

    active: ActiveExpansions
    sections: tuple[int, ...] = ()
    # whether input and output keep the strides that they have in the base model
    keeps_strides = False
    head_axis: int | None = None

    def layout(self) -> Layout | None:
        """Return the layout of the active paths."""
        return memo(self.layouts, self.active.now().paths, self.make_layout)

    def make_layout(self, paths: Paths) -> Layout | None:
        """Make the layout of these paths; None if the stock module runs alone."""
        if paths.is_base:
            return None
        groups, up_in = [], []
        for group in paths.groups(self.place):
            blocks = tuple(self.expansions._modules.get(name) for name in group.ups)
            groups.append((group, blocks))
            up_in += [None, *(0 if added is None else added.up_in for added in blocks)]
        is_stock = len(groups) == 1 and all(added is None for added in groups[0][1])
        return None if is_stock else Layout(tuple(groups), tuple(up_in), {})

    def run_stock(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stock module's own forward."""
        return super().forward(*args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        layout = self.layout()
        if layout is None:
            # the last token's features are strided, and torch takes another kernel for these if the weight is frozen
            return super().forward(x if self.keeps_strides else dense(x))
        return self.through(super().forward, x, layout)

    def through(self, run: Callable[[Tensor], Tensor], x: Tensor, layout: Layout) -> Tensor:
        """Run each path by itself: no operation sees more of a base stream than in the base model."""
        streams, outputs = iter(self.split(x, layout)), []
        for group, blocks in layout.groups:
            base = next(streams)
            if group.is_fixed and base.requires_grad:
                # nothing behind it trains, so no gradient has to pass
                self.active.check_frozen()
                base = base.detach()
            is_copied = group.has_w12 and blocks[0] is not None and blocks[0].replaces_base
            y = None if is_copied else run(base)
            ups = []
            # blocks come first: zip stops after the last without taking a stream of the next group
            for added, up in zip(blocks, streams, strict=False):
                if added is None:
                    ups.append(None)
                else:
                    y, y_up = added(base, up, y, group.has_w12)
                    ups.append(y_up)
            outputs.append([y, *ups])
        return self.join(outputs, layout)

    def split(self, x: Tensor, layout: Layout) -> Sequence[Tensor]:
        """Split streams, each into its own memory, since torch chooses kernels by the strides of an operand."""
        widths = layout.widths_of(x.shape[-1])
        if known := streams_of(x, widths):
            return known
        parts = x.split_with_sizes(widths, dim=-1)
        # a chunk of a fused projection is strided in the base model, and has to stay so
        return parts if self.keeps_strides and not x.is_contiguous() else [aligned_contiguous(part) for part in parts]

    def join(self, outputs: list[list[Tensor | None]], layout: Layout) -> Tensor:
        """Join the results of all paths."""
        if self.sections:
            return self.join_sections(outputs, layout)
        return join_streams(*(stream for group in outputs for stream in group if stream is not None))

    def join_sections(self, outputs: list[list[Tensor | None]], layout: Layout) -> Tensor:
        """Join a fused projection section by section: q, q_up, k, k_up, ..."""
        columns = []
        for (base, *ups), (_, blocks) in zip(outputs, layout.groups, strict=True):
            columns.append(base.split(self.sections, dim=-1))
            pairs = zip(ups, blocks, strict=True)
            columns += [up.split(added.up_sections, dim=-1) for up, added in pairs if up is not None]
        return torch.cat([part for parts in zip(*columns, strict=True) for part in parts], dim=-1)


class ExpandedLast(ExpandedModule):
    """The last norm. It concatenates its groups along the batch, padded to the same width.

    That is the width before the first layer, since stock code may have stored it there and expects it here again.
    `stream_widths` has the widths of up streams by expansion, and of the base stream under the empty name.
    """

    def join(self, outputs: list[list[Tensor | None]], layout: Layout) -> Tensor:
        if len(outputs) == 1:
            return super().join(outputs, layout)
        names = {path.expansion for path in self.active.now().paths.paths}
        width = sum(self.stream_widths[name] for name in names | {""})
        joined = [torch.cat([stream for stream in group if stream is not None], dim=-1) for group in outputs]
        return torch.cat([functional.pad(streams, (0, width - streams.shape[-1])) for streams in joined])


class ExpandedActivation(ExpandedModule):
    """An activation; its input may be strided in the base model."""

    keeps_strides = True


class ExpandedHeadNorm(ExpandedModule):
    """A norm inside each head, shared by all heads along `head_axis`.

    The base has `base_heads` of them. If queries and keys share the norm, these are the heads of keys.
    """

    # its output has the strides of its input, and attention chooses its kernel by them
    keeps_strides = True

    def split(self, x: Tensor, layout: Layout) -> Sequence[Tensor]:
        # clone() keeps the order of strides, so the base's heads have those of the base model
        heads = [self.base_heads if width is None else width for width in layout.up_in]
        # in every stream there are more heads of queries than of keys, by the same factor
        factor = x.shape[self.head_axis] // sum(heads)
        return [part.clone() for part in x.split([factor * count for count in heads], self.head_axis)]

    def join(self, outputs: list[list[Tensor | None]], layout: Layout) -> Tensor:
        parts = [heads.movedim(self.head_axis, -2) for group in outputs for heads in group if heads is not None]
        return torch.cat(parts, dim=-2).movedim(-2, self.head_axis)


class ExpandedEmbedding(ExpandedModule):
    """A module whose input is no hidden state, such as an embedding; up streams come beside its output."""

    def new_rows(self) -> Tensor | None:
        """Return the rows of new tokens, or None; every path reads them, since any text may contain new tokens."""
        found = (blocks.rows_of_new_tokens() for blocks in self.expansions.values())
        return next((rows for rows in found if rows is not None), None)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        layout, new = self.layout(), self.new_rows()
        (read,) = args[:1] or list(kwargs.values())[:1]
        y = self.run_stock(*args, **kwargs) if new is None else self.embed(read, new)
        if layout is None:
            return y
        ups = [blocks(read, read, y, False)[1] for blocks in layout.groups[0][1] if blocks is not None]
        return torch.cat([y, *(up for up in ups if up is not None)], dim=-1)

    def embed(self, ids: Tensor, new: Tensor) -> Tensor:
        """Embed ids; those beyond the stock rows are of new tokens.

        The stock module's forward embeds both, so it also scales the new rows if it scales its own.
        """
        rows = len(self.weight)
        is_new = ids >= rows
        y = self.run_stock(ids.masked_fill(is_new, 0))
        y_new = twin(self, weight=new, padding_idx=None).run_stock((ids - rows).clamp_(min=0))
        return torch.where(is_new[..., None], y_new.to(y.dtype), y)


class ExpandedBlock(ExpandedModule):
    """A whole block of a layer, run as it is on each base stream."""

    def make_layout(self, paths: Paths) -> Layout | None:
        caches = CACHES_OF_MODULES.intersection(signature(stock_class(self).forward).parameters)
        if caches and len(paths.groups(self.place)) > 1:
            raise ValueError(
                f"{type(self).__name__}: keeps a cache ({', '.join(sorted(caches))}) and runs as a whole, so two base "
                "streams cannot pass through it. Run one expansion at a time, or expand another part of these layers."
            )
        layout = super().make_layout(paths)
        if layout is None:
            return None
        all_blocks = [added for _, blocks in layout.groups for added in blocks if added is not None]
        if all_blocks:
            # in a layer that is not expanded, a norm before the block removes the up streams, so fewer streams arrive
            widths = []
            for _, blocks in layout.groups:
                ups = (0 if added is None or added.w21 is None else added.up_in for added in blocks)
                widths += [all_blocks[0].base_width, *ups]
            layout.widths[sum(widths)] = widths
        return layout

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        layout, outputs = self.layout(), []

        def run(base: Tensor) -> Tensor:
            inputs = kwargs if args else kwargs | {"hidden_states": base}
            outputs.append(self.run_stock(*((base, *args[1:]) if args else ()), **inputs))
            y = outputs[-1][0] if isinstance(outputs[-1], tuple) else outputs[-1]
            # some blocks flatten the batch
            return y if layout is None else y.view(*base.shape[:-1], -1)

        hidden = args[0] if args else kwargs["hidden_states"]
        y = run(dense(hidden)) if layout is None else self.through(run, hidden, layout)
        # further outputs, such as router scores of a mixture of experts, are those of the last path
        return (y, *outputs[-1][1:]) if isinstance(outputs[-1], tuple) else y


class WholeHead(NamedTuple):
    """The head as one matrix [head, head_up] for the output of the base model, [base stream, up stream]."""

    weight: Tensor
    bias: Tensor | None


class ExpandedHead(ExpandedModule):
    """The head. It returns the logits of a single path, or the result of `Context.answer` for features of all paths.

    `softcap` caps the logits of each path if the stock model would cap them too late: see `_run_stock`. If an expansion
    adds tokens, their logits come after those of the base, on every path.
    """

    softcap: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        context = self.active.now()
        if context.answer is not None:
            return context.answer(x)
        if len(context.paths.paths) > 1:
            raise ValueError(
                "The head is called by itself, and several paths run: only the model's own forward combines their "
                "logits. Call the model, or choose one path: model.use_expansion(NAME)."
            )
        layout = self.layout()
        if layout is None:
            logits = self.base_logits(x.contiguous(), x)
        else:
            logits = self.through(lambda base: self.base_logits(base, x), x, layout)
        is_whole = context.paths.with_new_tokens or self.new_rows is None
        return logits if is_whole else self.without_new_tokens(logits, None)

    def join(self, outputs: list[list[Tensor | None]], layout: Layout) -> Tensor:
        return outputs[0][0]

    def base_logits(self, base: Tensor, unsplit: Tensor) -> Tensor:
        """Compute logits of the contiguous base stream; `unsplit` has the strides of the base model's features.

        Features of last tokens alone are strided, and torch adds a bias to their product in a separate step.
        """
        if self.bias is None or unsplit.is_contiguous():
            logits = self.run_stock(base)
        else:
            logits = functional.linear(base, self.weight) + self.bias
        new = self.new_rows
        return logits if new is None else torch.cat((logits, product(base, new, logits)), -1)

    @property
    def new_rows(self) -> Tensor | None:
        """Return the rows of new tokens; None if no expansion adds tokens."""
        return next((rows for blocks in self.expansions.values() if (rows := blocks.rows) is not None), None)

    def whole(self, blocks: HeadBlocks) -> WholeHead:
        """Return the head of one expansion as one matrix."""
        weight, bias, up = self.weight, self.bias, blocks.up_weight
        if blocks.rows is not None:
            weight = torch.cat((weight, blocks.rows.to(weight.dtype)))
            bias = None if bias is None else functional.pad(bias, (0, len(blocks.rows)))
        return WholeHead(weight if up is None else torch.cat((weight, up.to(weight.dtype)), 1), bias)

    def without_new_tokens(self, logits: Tensor, blocks: HeadBlocks | None) -> Tensor:
        """Give new tokens probability 0 on a path without rows for them; in place if the logits have no gradient.

        Their logits are so far below the largest that the exponential of the difference is 0 in float32. Infinity would
        make a divergence NaN, and a router's additions to the lowest number of float32 would be rounded away.
        """
        known = len(self.weight)
        if logits.shape[-1] == known or (blocks is not None and blocks.rows is not None):
            return logits
        is_routed = self.active.now().choice.router is not None
        least = logits[..., :known].detach().amax(-1, keepdim=True) - (NEAR if is_routed else FAR)
        if logits.requires_grad:
            return torch.cat((logits[..., :known], least.expand_as(logits[..., known:])), -1)
        logits[..., known:] = least
        return logits

    def capped(self, logits: Tensor) -> Tensor:
        """Cap logits as the stock model does."""
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def capped_in_place(self, logits: Tensor) -> Tensor:
        """Cap logits in place, or in new memory if they have a gradient."""
        if self.softcap is None or logits.requires_grad:
            return self.capped(logits)
        return logits.div_(self.softcap).tanh_().mul_(self.softcap)


# kind in config.json: class before that of the stock module, and class of its blocks
KINDS: dict[str, tuple[type, type]] = {
    "linear": (ExpandedModule, LinearBlocks),
    "grown": (ExpandedModule, GrownBlocks),
    "norm": (ExpandedModule, NormBlocks),
    "passing": (ExpandedModule, PassingBlocks),
    "activation": (ExpandedActivation, SameBlocks),
    "head_norm": (ExpandedHeadNorm, SameBlocks),
    "block": (ExpandedBlock, DenseBlocks),
    "embedding": (ExpandedEmbedding, EmbeddingBlocks),
    "padding": (ExpandedEmbedding, PassingBlocks),
    "head": (ExpandedHead, HeadBlocks),
    "last": (ExpandedLast, PassingBlocks),
}


@cache
def expanded_class(kind: type, stock: type) -> type:
    """Make the class of an expanded module: the stock class with one of KINDS before it."""
    return type(f"{stock.__name__}WithUpStream", (kind, stock), {"__module__": __name__})


def stock_class(module: nn.Module) -> Any:
    """Return the class that a module had before it was expanded."""
    return type(module).__bases__[1] if isinstance(module, ExpandedModule) else type(module)


def expand_module(module: nn.Module, kind: str, active: ActiveExpansions, place: int) -> None:
    """Let paths pass through a stock module, in place; its stock parameters keep their names."""
    if isinstance(module, ExpandedModule):
        return
    module.__class__ = expanded_class(KINDS[kind][0], type(module))
    module.active, module.place, module.layouts, module.expansions = active, place, {}, nn.ModuleDict()


def expanded_modules(model: nn.Module) -> Iterator[ExpandedModule]:
    """Iterate over the modules through which paths pass."""
    return (module for module in model.modules() if isinstance(module, ExpandedModule))


# ---- attention


class HeadPart(NamedTuple):
    """Heads that attend together, and with no others."""

    heads: int  # how many heads of queries
    kv_heads: int  # how many of keys and values
    is_base: bool  # whether the base has them
    is_detached: bool = False  # whether gradients stop there: nothing that trains reaches the base stream


class Heads(NamedTuple):
    """Heads that an expansion adds to a layer."""

    heads: int
    kv_heads: int


def split_heads(states: Tensor, sizes: list[int], parts: tuple[HeadPart, ...], is_eager: bool) -> list[Tensor]:
    """Split queries, keys or values (b, heads, t, head size) into parts of `sizes` heads.

    Heads of the base get the strides and the alignment that they have in the base model, because torch chooses matrix
    kernels by both. In a cache each head is contiguous, so the usual head sizes need no copy. Exception: the batched
    product of eager attention would copy them into another order.
    """
    batch, _, rows, size = states.shape
    _, head_stride, row_stride, _ = states.stride()
    is_transposed = row_stride > head_stride
    is_unaligned = is_eager or head_stride * states.element_size() % CACHE_LINE
    heads = []
    for index, (part, piece) in enumerate(zip(parts, states.split(sizes, dim=1), strict=True)):
        piece = piece.detach() if part.is_detached else piece
        if part.is_base and is_transposed:
            # a head of a fused projection has an offset from its start; a graph cannot hold that number
            start = 0 if torch.compiler.is_compiling() else states.storage_offset() % head_stride
            beside = states.new_empty(batch, rows, sizes[index], head_stride)
            piece = beside[..., start : start + size].transpose(1, 2).copy_(piece)
        # heads of an expansion are aligned alike on one path and on two; if they train, backward stores this copy
        elif is_transposed or (is_unaligned and (batch > 1 or index)) or (piece.requires_grad and not part.is_base):
            piece = piece.clone()
        heads.append(piece)
    return heads


def split_attention(module, query, key, value, attention_mask, **kwargs):
    """Compute attention of each part of the heads separately, with the kernel that the model's config names."""
    stock = module.stock
    name = stock.config._attn_implementation
    run = stock.eager_attention if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
    parts = module.parts
    heads, kv_heads = [part.heads for part in parts], [part.kv_heads for part in parts]
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 4 and {*heads} > {attention_mask.shape[1]} != {1}:
        raise ValueError("attention_mask: has a part for each head of the base, expected one for all, new heads too.")
    states = [
        split_heads(tensor, sizes, parts, name == "eager")
        for tensor, sizes in ((query, heads), (key, kv_heads), (value, kv_heads))
    ]
    outputs = [run(stock, *part_states, attention_mask, **kwargs) for part_states in zip(*states, strict=True)]
    attended, weights = zip(*outputs, strict=True)
    joined = attended[0] if len(attended) == 1 else torch.cat(attended, dim=2)
    return joined, None if weights[0] is None else torch.cat(weights, dim=1)


SPLIT_ATTENTION = "scale_surgery_heads_of_paths"
ALL_ATTENTION_FUNCTIONS.register(SPLIT_ATTENTION, split_attention)


class ExpandedAttention:
    """Attention of a layer, whose stock forward sees the heads of all active paths; see `expand_attention`."""

    active: ActiveExpansions

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        parts = memo(self.parts_of, self.active.now().paths, self.make_parts)
        if parts is None:
            return super().forward(*args, **kwargs)
        return type(self).__bases__[1].forward(self.widened(parts), *args, **kwargs)

    def make_parts(self, paths: Paths) -> tuple[HeadPart, ...] | None:
        """List the heads of these paths in their order; None if there are only those of the base."""
        parts = []
        for group in paths.groups(self.place):
            parts.append(HeadPart(*self.stock_heads, is_base=True, is_detached=group.is_fixed))
            parts += [HeadPart(*self.new_heads[name], is_base=False) for name in group.ups if name in self.new_heads]
        return None if len(parts) == 1 else tuple(parts)

    def widened(self, parts: tuple[HeadPart, ...]) -> nn.Module:
        """Copy this module for its stock forward, with the same tensors and modules, and the heads of all parts."""
        heads = sum(part.heads for part in parts)
        config = {name: getattr(self.config, name) * heads // self.stock_heads.heads for name in self.config_values}
        values = {name: getattr(self, name) * heads // self.stock_heads.heads for name in self.attributes}
        config["_attn_implementation"] = SPLIT_ATTENTION
        return twin(self, **values, parts=parts, stock=self, config=View(self.config, config))


def upcast_attention(stock, query, key, value, attention_mask, **kwargs):
    """Compute attention as GPT-2 does by its setting `reorder_and_upcast_attn`, if its kernel is the eager one."""
    return stock._upcast_and_reordered_attn(query, key, value, attention_mask)


def find_eager_attention(module: nn.Module) -> Any:
    """Return the eager attention function of a module's file; each file of transformers has its own.

    Raises:
        ValueError: If there is none: older releases compute the attention of some models inside the module.
    """
    if getattr(module, "reorder_and_upcast_attn", False):
        return upcast_attention
    function = vars(import_module(type(module).__module__)).get("eager_attention_forward")
    if function is None:
        raise ValueError(
            f"config.json: scale_surgery adds heads to {type(module).__name__}, which in transformers "
            f"{transformers.__version__} does not hand queries, keys and values to a function of attention, expected "
            "one that does. Load the model with the release that surgery.json names."
        )
    return function


@cache
def expanded_attention_class(stock: type) -> type:
    """Make the class of an attention module that sees the heads of all paths."""
    return type(f"{stock.__name__}WithHeads", (ExpandedAttention, stock), {"__module__": __name__})


def expand_attention(module: nn.Module, facts: dict[str, Any], active: ActiveExpansions, place: int) -> None:
    """Let the heads of all paths attend in a stock attention module, in place.

    Args:
        module: The attention module.
        facts: `heads`, `kv_heads`, and in `attributes` and `config` the names of all numbers that depend on them.
        active: The active expansions of the model.
        place: Number of its layer.
    """
    if isinstance(module, ExpandedAttention):
        return
    module.eager_attention = find_eager_attention(module)
    module.__class__ = expanded_attention_class(type(module))
    module.active, module.place = active, place
    module.parts_of = {}  # parts of the heads by paths; None if there are only those of the base
    module.stock_heads, module.new_heads = Heads(facts["heads"], facts["kv_heads"]), {}  # new heads by expansion
    # names of attributes and of config values that are a number of heads, or the width of all heads
    module.attributes, module.config_values = tuple(facts["attributes"]), tuple(facts["config"])


# ---- blocks of a module


def up_in(plan: dict[str, Any], spec: dict[str, Any], attention: dict[str, Any]) -> int:
    """Return the width of the up stream that a module reads, in features or heads.

    Args:
        plan: Entry of the expansion in config.json.
        spec: Entry of the module there.
        attention: Entry of the attention of the layer there.
    """
    if "in_features" in spec:
        return spec["in_features"][1]
    if spec["kind"] in ("norm", "head", "block"):
        return spec["up"]
    if spec["kind"] == "activation":
        return plan["widths"]["up_inner_width"]
    if spec["kind"] == "head_norm":
        heads = next(iter(attention.values()))
        new = new_heads(plan, heads)
        return new.heads if spec["heads"] == heads["heads"] else new.kv_heads
    return plan["widths"]["up_width"] if spec["kind"] == "passing" and spec["base"] is not None else 0


def new_heads(plan: dict[str, Any], spec: dict[str, Any]) -> Heads:
    """Count the heads that an expansion adds to a layer."""
    kv_heads = plan["widths"]["up_kv_heads"]
    return Heads(kv_heads * (spec["heads"] // spec["kv_heads"]), kv_heads)


def make_blocks(module: nn.Module, plan: dict, spec: dict, attention: dict, w12_groups: list) -> Blocks:
    """Make the blocks of an expansion for a module."""
    blocks: Blocks = KINDS[spec["kind"]][1](module, spec, up_in(plan, spec, attention))
    has_bias, has_w12 = getattr(module, "bias", None) is not None, spec.get("group") in w12_groups
    rows = len(module.weight) if spec["kind"] in ("embedding", "head") else 0
    is_gated = plan.get("variant") == "gated"
    blocks.add_tensors(plan["dtype"], shapes_of(spec, rows, has_bias=has_bias, has_w12=has_w12, is_gated=is_gated))
    return blocks
