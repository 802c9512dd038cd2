"""Modules of an expanded model: stock modules, and beside them what each expansion adds.

    [ y    ]   [ W    W12 ] [ x    ]      W    pretrained, frozen, used by the stock forward
    [ y_up ] = [ W21  W22 ] [ x_up ]      W12, W21, W22   blocks of an expansion (SCALE, arXiv 2511.03270, eq. 1)

A stock module gets a second class, which takes its input apart into streams (see `expanded_paths`), runs the stock
forward once on each base stream, lets each expansion compute its up stream from that, and puts all of it together.
Because the stock forward sees the same values in the same shapes as in the base model, its results are the base
model's, bit for bit. W12 y is added to a base stream that is the expansion's own, and to no other.

With gates, what writes into the base stream or the logits reads g y_up in place of y_up: see `gate_scores`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .expanded_paths import Paths, Running, memo
from .expanded_releases import CACHES_OF_MODULES
from .expanded_stock import View, normalise, through_gate
from .expanded_streams import (
    CACHE_LINE,
    add_new_product,
    add_product,
    aligned_contiguous,
    dense,
    is_row,
    join_streams,
    product,
    row_up,
    streams_of,
)

# below the largest logit, a logit of probability 0: for what a router adds to it in float32, and where there is none
# even after a stock model that makes its logits smaller
NEAR, FAR = 200, 30_000


def twin(module: Any, **values: Any) -> Any:
    """A copy of a module that shares its tensors and modules; `values` are replaced."""
    copy = object.__new__(type(module))
    copy.__dict__.update(vars(module), **values)
    return copy


class Blocks(nn.Module):
    """What one expansion adds to a stock module: its tensors, and the computation of its up stream.

    Attributes:
        group_of: Group of each tensor, by which training is chosen and counted.
        up_in: Features, or heads, of the up stream that the module reads.
        up_sections: Widths of what it writes, for each section of a fused projection.
        replaces_base: Whether a copy of the base weight that trains takes the place of it where W12 exists.
    """

    group_of: dict[str, str] = {"gate": "gates"}
    replaces_base = False

    def __init__(self, stock: nn.Module, spec: dict[str, Any], up_in: int = 0) -> None:
        super().__init__()
        # past nn.Module, which would list the stock module as a part of this one
        self.__dict__["stock"] = stock
        self.up_in, self.up_sections = up_in, []

    def forward(self, base: Tensor, up: Tensor, y: Tensor | None, has_w12: bool) -> tuple[Tensor, Tensor | None]:
        """Compute both streams of a path.

        Args:
            base: Base stream that the module reads.
            up: Up stream that it reads.
            y: What the stock module gives for the base stream; None where a copy takes its place.
            has_w12: Whether W12 exists for this path.

        Returns:
            The output for the base stream, and the up stream or None.
        """
        # reading is a part of it: accelerate brings offloaded tensors for a forward alone
        return self.compute(base, self.read(base, up), y, has_w12)

    def compute(self, base: Tensor, up: Tensor, y: Tensor | None, has_w12: bool) -> tuple[Tensor, Tensor | None]:
        """Compute both streams, of what was read of the up stream."""
        raise NotImplementedError

    def read(self, base: Tensor, up: Tensor) -> Tensor:
        """What the blocks read of an up stream: all of it, or what their gate lets through."""
        return through_gate(self, base, up, up)

    def add_tensors(self, dtype: str | None, shapes: dict[str, tuple[int, ...]]) -> None:
        """Add tensors, zero until they are loaded, in `dtype` or in that of the stock weight; none that is empty."""
        like = next(self.stock.parameters(), torch.empty(()))
        # a quantised weight may be of whole numbers, and makes no tensors that are not quantised
        stored = like.dtype if like.dtype.is_floating_point else torch.get_default_dtype()
        kind = getattr(torch, dtype) if dtype else stored
        for name, shape in shapes.items():
            made = None if 0 in shape else nn.Parameter(torch.zeros(shape, dtype=kind, device=like.device))
            self.register_parameter(name, made)

    def align(self) -> None:
        """Let each tensor begin at a cache line; loaders leave it where it lies in a file, at any place.

        On a CPU the product of a matrix and a single row may round by where the matrix begins.
        """
        for block in self._parameters.values():
            if block is not None:
                block.data = aligned_contiguous(block.data)


class LinearBlocks(Blocks):
    """Blocks of a linear (or Conv1D); rows of a block are outputs, in both storage orders.

    In a preservation layer W12 is exactly zero by not existing.
    """

    group_of = Blocks.group_of | {"w12": "w12", "w21": "w21", "w22": "w22", "up_bias": "biases"}

    def __init__(self, stock, spec, up_in):
        super().__init__(stock, spec, up_in)
        self.up_sections = [up for _, up in spec["out_features"]]

    def compute(self, base: Tensor, up: Tensor, y: Tensor | None, has_w12: bool) -> tuple[Tensor, Tensor | None]:
        # each is looked up once: a token at a time, that costs as much as a small product
        tensors = self._parameters
        w12, w21, w22, bias = tensors["w12"], tensors["w21"], tensors["w22"], tensors["up_bias"]
        if w21 is None:
            y_up = None
        elif w21.dtype == y.dtype and is_row(base, y):
            y_up = row_up(base.view(-1), up.view(-1), w21, w22, bias).view(*y.shape[:-1], -1)
        else:
            y_up = product(base, w21, y)
            y_up = y_up if w22 is None else add_product(y_up, up, w22)
            y_up = y_up if bias is None else y_up + bias.to(y.dtype)
        if has_w12 and w12 is not None:
            # in place where nothing remembers what it was
            y = (add_new_product if torch.is_grad_enabled() else add_product)(y, up, w12)
        return y, y_up


def aligned(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor, contiguous, beginning at the same place of a cache line as `like`.

    On a CPU the product of a matrix and a single row takes its elements in another order where the matrix is aligned
    otherwise, and then rounds otherwise.
    """
    has_memory = not torch.compiler.is_compiling() and tensor.device.type == like.device.type == "cpu"
    is_same = has_memory and (like.data_ptr() - tensor.data_ptr()) % CACHE_LINE == 0
    if not has_memory or tensor.dtype != like.dtype or (is_same and tensor.is_contiguous()):
        return tensor.contiguous()
    size = tensor.element_size()
    memory = tensor.new_empty(tensor.numel() + CACHE_LINE // size)
    start = (like.data_ptr() - memory.data_ptr()) % CACHE_LINE // size
    return memory[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)


class GrownBlocks(LinearBlocks):
    """Blocks of a grown MLP (Grow, Don't Overwrite, arXiv 2603.08647): what is new begins as copies of the base.

        gate, up    y      = W x             a trained copy `w11` (and `bias11`) in place of W where `trains_base`
                    y_up   = W21 x           W21 begins as W, once for each new copy
        down        y      = c W x + W12 x_up + b       c = `share`, 1 over the number of copies; W12 begins as c W

    Copies are computed by the stock module's own operation, on memory that is aligned as the base's, so that two equal
    halves are bit for bit those of the base, and halving and adding them rounds nothing.
    """

    group_of = LinearBlocks.group_of | {"w11": "w11", "bias11": "biases"}

    def __init__(self, stock, spec, up_in):
        super().__init__(stock, spec, up_in)
        self.share, self.replaces_base = spec.get("share", 1.0), spec.get("trains_base", False)

    def compute(self, base: Tensor, up: Tensor, y: Tensor | None, has_w12: bool) -> tuple[Tensor, Tensor | None]:
        if y is None:
            y = self.copied(base, self.w11, self.bias11, base)
        if has_w12 and self.w12 is not None:
            bias = None if self.stock.bias is None else self.stock.bias * (1 - self.share)
            y = torch.add(self.copied(up, self.w12, bias, y), y, alpha=self.share)
        return y, None if self.w21 is None else self.copied(base, self.w21, self.up_bias, y)

    def copied(self, x: Tensor, block: Tensor, bias: Tensor | None, like: Tensor) -> Tensor:
        """What the stock module would compute with this block, whose rows are outputs, and this bias."""
        x, bias = x.to(block.dtype), None if bias is None else bias.to(block.dtype)
        if isinstance(self.stock, nn.Linear):
            # some stock classes add the bias in a step of its own
            return stock_class(self.stock).forward(View(self.stock, {"weight": block, "bias": bias}), x).to(like.dtype)
        # Conv1D stores (inputs, outputs), and a product reads its operands in the order in which they lie
        rows = torch.addmm(bias, x.reshape(-1, x.shape[-1]), aligned(block.t(), self.stock.weight))
        return rows.view(*x.shape[:-1], -1).to(like.dtype)

    def align(self) -> None:
        super().align()
        for name in ("w11", "w12", "w21"):
            block = self._parameters.get(name)
            if block is not None:
                block.data = aligned(block.data, self.stock.weight)


class NormBlocks(Blocks):
    """The norm of an up stream, by its own statistics, computed in float32.

    `style` is that of the stock norm: see `normalise`. It adds a bias where the stock norm does. The stock norm may
    have no gain; that of the up stream has one.
    """

    group_of = {"up_weight": "norms", "up_bias": "norms"}

    def __init__(self, stock, spec, up_in):
        super().__init__(stock, spec, up_in)
        self.style, self.epsilon = spec["style"], spec["epsilon"]

    def compute(self, base: Tensor, up: Tensor, y: Tensor | None, has_w12: bool) -> tuple[Tensor, Tensor | None]:
        bias = None if self.up_bias is None else self.up_bias.float()
        return y, normalise(up.float(), self.style, self.epsilon, self.up_weight.float(), bias).to(y.dtype)


class EmbeddingBlocks(Blocks):
    """Added columns of an embedding, which take the same scale as the stock ones where there is one.

    Rows of new tokens have them too.
    """

    group_of = {"up_weight": "embedding", "new_rows": "new_tokens"}

    def compute(self, base: Tensor, up: Tensor, y: Tensor | None, has_w12: bool) -> tuple[Tensor, Tensor | None]:
        if self.up_weight is None:
            return y, None
        # what it reads are token ids, some of which may be of tokens that another expansion adds
        known, rows = len(self.up_weight), len(self.stock.weight)
        is_other = base >= known if known == rows and self.stock.new_rows is not None else None
        ids = base if is_other is None else base.masked_fill(is_other, 0)
        y_up = functional.embedding(ids, self.up_weight, self.stock.padding_idx).to(y.dtype)
        y_up = y_up if is_other is None else y_up.masked_fill(is_other[..., None], 0)
        scale = getattr(self.stock, "embed_scale", None)
        if scale is None:
            return y, y_up
        return y, y_up * (scale.to(y_up.dtype) if isinstance(scale, Tensor) else scale)


class HeadBlocks(Blocks):
    """Added columns of the head: logits + head_up x_up, where head_up is `up_weight`, zero at first, never tied.

    `embedding` has the rows of new tokens where the base's head is tied to it.
    """

    group_of = Blocks.group_of | {"up_weight": "head", "new_rows": "new_tokens"}

    @property
    def rows(self) -> Tensor | None:
        """Rows of new tokens, or None."""
        embedding = self.__dict__.get("embedding")
        rows: Tensor | None = (self if embedding is None else embedding).new_rows
        return rows

    def forward(self, base, up, y, has_w12, is_read=False):
        # paths side by side are read once, without logits, and may be multiplied several times
        read = up if is_read else self.read(base, up)
        return (None, read) if y is None else self.compute(base, read, y, has_w12)

    def compute(self, base: Tensor, up: Tensor, y: Tensor | None, has_w12: bool) -> tuple[Tensor, Tensor | None]:
        if self.up_weight is None:
            return y, None
        known = len(self.up_weight)
        # in the memory of the logits of the base stream, which are large; those of another's new tokens come after them
        whole = add_product(y if y.shape[-1] == known else y[..., :known], up, self.up_weight)
        return whole if y.shape[-1] == known else torch.cat((whole, y[..., known:]), -1), None


class SameBlocks(Blocks):
    """A module that treats an up stream as a base stream: an activation, or a norm inside each head.

    Each runs alone: vector and tail lanes of one kernel may round differently.
    """

    def compute(self, base: Tensor, up: Tensor, y: Tensor | None, has_w12: bool) -> tuple[Tensor, Tensor | None]:
        return y, self.stock.run_stock(up)


class PassingBlocks(Blocks):
    """A module that has no block: it reads the base stream alone, and writes `up_out` zeros beside it.

    So the up stream passes through the residual connection of a layer that was not chosen.
    """

    group_of = {"new_rows": "new_tokens"}

    def __init__(self, stock, spec, up_in):
        super().__init__(stock, spec, up_in)
        self.up_out = spec["up"]

    def compute(self, base: Tensor, up: Tensor, y: Tensor | None, has_w12: bool) -> tuple[Tensor, Tensor | None]:
        return y, y.new_zeros(*y.shape[:-1], self.up_out) if self.up_out else None


class DenseBlocks(Blocks):
    """A small dense MLP beside a whole block of a layer, which runs as it is on the base stream.

        y = block(x) + W12 h      y_up = V h      h = silu(W21 x + W22 x_up), of `inner` features; V is `up_weight`

    A mixture's router sees the base stream alone. Without `inner` the block only lets the up stream pass.
    """

    group_of = Blocks.group_of | {"w12": "w12", "w21": "w21", "w22": "w22", "up_weight": "w22"}

    def __init__(self, stock, spec, up_in):
        super().__init__(stock, spec, up_in)
        self.base_width, self.up_out = spec["base"], spec["up"]

    def read(self, base: Tensor, up: Tensor) -> Tensor:
        """All of it: what W12 reads here is h."""
        return up

    def compute(self, base: Tensor, up: Tensor, y: Tensor | None, has_w12: bool) -> tuple[Tensor, Tensor | None]:
        if self.w21 is None:
            return y, y.new_zeros(*y.shape[:-1], self.up_out)
        h = product(base, self.w21, y)
        h = functional.silu(h if self.w22 is None else h + product(up, self.w22, y))
        h = through_gate(self, base, up, h)
        y_up = y.new_zeros(*y.shape[:-1], 0) if self.up_weight is None else product(h, self.up_weight, y)
        return add_new_product(y, h, self.w12) if has_w12 and self.w12 is not None else y, y_up


class LayoutGroup(NamedTuple):
    """A base stream and its up streams as a module reads them."""

    has_w12: bool  # whether the base stream is an expansion's own, so that W12 exists there
    is_fixed: bool  # whether nothing that trains reaches it
    # blocks of each up stream, None where the expansion adds nothing to the module
    blocks: tuple[Blocks | None, ...]


class Layout(NamedTuple):
    """How the streams of the chosen paths lie in what a module reads."""

    groups: tuple[LayoutGroup, ...]  # the groups of streams, in the order in which they lie
    up_in: tuple[int | None, ...]  # widths of all streams; None for base streams, which are equally wide
    widths: dict[int, list[int]]  # widths of all streams by their sum, filled as sums are met

    def widths_of(self, width: int) -> list[int]:
        """Widths of all streams that the module reads, from their sum."""
        # a token at a time, working them out costs as much as a small product
        return memo(self.widths, width, self._widths_of)

    def _widths_of(self, width: int) -> list[int]:
        ups = [up for up in self.up_in if up is not None]
        base = (width - sum(ups)) // (len(self.up_in) - len(ups))
        return [base if up is None else up for up in self.up_in]


class ExpandedModule:
    """Mixin before the stock class of a module through which all chosen paths pass.

    Attributes:
        running: What the model runs.
        place: Number of its layer; -1 before the first one, and the number of layers after the last.
        expansions: What each expansion adds to it, by name; those that add nothing are not there.
        layouts: How streams lie in what it reads, by the paths; None where the stock module runs alone.
        sections: Widths of the parts of a fused projection; empty where it is none.
    """

    running: Running
    sections: tuple[int, ...] = ()
    # its input and output lie in memory as in the base model
    keeps_strides = False
    head_axis: int | None = None

    def layout(self) -> Layout | None:
        """The layout of the streams that the module reads now."""
        return memo(self.layouts, self.running.now().paths, self.make_layout)

    def make_layout(self, paths: Paths) -> Layout | None:
        """The layout of the streams of these paths; None where the stock module runs alone."""
        if paths.is_base:
            return None
        groups, up_in = [], []
        for group in paths.groups(self.place):
            blocks = tuple(self.expansions._modules.get(name) for name in group.ups)
            groups.append(LayoutGroup(bool(group.writer), group.is_fixed, blocks))
            up_in += [None, *(0 if added is None else added.up_in for added in blocks)]
        is_stock = len(groups) == 1 and all(added is None for added in groups[0].blocks)
        return None if is_stock else Layout(tuple(groups), tuple(up_in), {})

    def run_stock(self, *args: Any, **kwargs: Any) -> Any:
        """The stock module's own forward."""
        return super().forward(*args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        layout = self.layout()
        if layout is None:
            # the last token's features are strided, and torch takes another kernel for them when a weight is frozen
            return super().forward(x if self.keeps_strides else dense(x))
        return self.through(super().forward, x, layout)

    def through(self, run: Callable[[Tensor], Tensor], x: Tensor, layout: Layout) -> Tensor:
        """Run each path by itself: no operation sees more of a base stream than in the base model."""
        streams, outputs = iter(self.split(x, layout)), []
        for group in layout.groups:
            base = next(streams)
            if group.is_fixed and base.requires_grad:
                # so no gradient has to pass through it
                base = base.detach()
            blocks = group.blocks
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
        """Split streams, each into its own memory: kernels choose their path by the strides of an operand."""
        widths = layout.widths_of(x.shape[-1])
        if known := streams_of(x, widths):
            return known
        parts = x.split_with_sizes(widths, dim=-1)
        # a chunk of a fused projection is strided in the base model too, and must stay so here
        return parts if self.keeps_strides and not x.is_contiguous() else [aligned_contiguous(part) for part in parts]

    def join(self, outputs: list[list[Tensor | None]], layout: Layout) -> Tensor:
        """Put the results of all paths side by side."""
        if self.sections:
            return self.join_sections(outputs, layout)
        return join_streams(*(stream for group in outputs for stream in group if stream is not None))

    def join_sections(self, outputs: list[list[Tensor | None]], layout: Layout) -> Tensor:
        """Join a fused projection section by section: q, q_up, k, k_up, ..."""
        columns = []
        for (base, *ups), group in zip(outputs, layout.groups, strict=True):
            columns.append(base.split(self.sections, dim=-1))
            pairs = zip(ups, group.blocks, strict=True)
            columns += [up.split(blocks.up_sections, dim=-1) for up, blocks in pairs if up is not None]
        return torch.cat([part for parts in zip(*columns, strict=True) for part in parts], dim=-1)


class ExpandedLast(ExpandedModule):
    """The last norm: it puts its groups one after the other along the batch, padded to the same width.

    That is the width before the first layer: stock code may have stored it there and expects it here again.
    `stream_widths` has the width of each up stream by its expansion, and of the base stream by the empty name.
    """

    def join(self, outputs: list[list[Tensor | None]], layout: Layout) -> Tensor:
        if len(outputs) == 1:
            return super().join(outputs, layout)
        names = {path.expansion for path in self.running.now().paths.paths}
        width = sum(self.stream_widths[name] for name in names | {""})
        joined = [torch.cat([stream for stream in group if stream is not None], dim=-1) for group in outputs]
        return torch.cat([functional.pad(streams, (0, width - streams.shape[-1])) for streams in joined])


class ExpandedActivation(ExpandedModule):
    """An activation; its input may be strided in the base model too."""

    keeps_strides = True


class ExpandedHeadNorm(ExpandedModule):
    """A norm inside each head, shared by all heads, which lie along `head_axis`.

    The base has `base_heads` of them: heads of keys, where queries pass through it too.
    """

    # its output lies in memory as its input does, and attention chooses its path by that
    keeps_strides = True

    def split(self, x: Tensor, layout: Layout) -> Sequence[Tensor]:
        # clone() keeps the order of strides, so the base's heads lie in memory as they do in the base model
        heads = [self.base_heads if width is None else width for width in layout.up_in]
        # of queries there are more by one factor, in every stream
        factor = x.shape[self.head_axis] // sum(heads)
        return [part.clone() for part in x.split([factor * count for count in heads], self.head_axis)]

    def join(self, outputs: list[list[Tensor | None]], layout: Layout) -> Tensor:
        parts = [heads.movedim(self.head_axis, -2) for group in outputs for heads in group if heads is not None]
        return torch.cat(parts, dim=-2).movedim(-2, self.head_axis)


class ExpandedEmbedding(ExpandedModule):
    """A module that reads no hidden state, such as an embedding; up streams stand beside its output."""

    @property
    def new_rows(self) -> Tensor | None:
        """Rows of new tokens, or None; every path reads them, as a text may have them whatever is chosen."""
        return next((rows for blocks in self.expansions.values() if (rows := blocks.new_rows) is not None), None)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        layout, new = self.layout(), self.new_rows
        (read,) = args[:1] or list(kwargs.values())[:1]
        y = self.run_stock(*args, **kwargs) if new is None else self.embed(read, new)
        if layout is None:
            return y
        ups = [blocks(read, read, y, False)[1] for blocks in layout.groups[0].blocks if blocks is not None]
        return torch.cat([y, *(up for up in ups if up is not None)], dim=-1)

    def embed(self, ids: Tensor, new: Tensor) -> Tensor:
        """Embed ids, of which those from the number of stock rows on are of new tokens.

        What the stock module does to its rows, such as scaling them, it does to new ones.
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
        all_blocks = [blocks for group in layout.groups for blocks in group.blocks if blocks is not None]
        if all_blocks:
            # in a layer that was not chosen, a norm before the block removes the up streams, so fewer streams arrive
            widths = []
            for group in layout.groups:
                ups = (0 if blocks is None or blocks.w21 is None else blocks.up_in for blocks in group.blocks)
                widths += [all_blocks[0].base_width, *ups]
            layout.widths[sum(widths)] = widths
        return layout

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        layout, outputs = self.layout(), []

        def run(base: Tensor) -> Tensor:
            inputs = kwargs if args else kwargs | {"hidden_states": base}
            outputs.append(self.run_stock(*((base, *args[1:]) if args else ()), **inputs))
            y = outputs[-1][0] if isinstance(outputs[-1], tuple) else outputs[-1]
            # some blocks lay all tokens in a row
            return y if layout is None else y.view(*base.shape[:-1], -1)

        hidden = args[0] if args else kwargs["hidden_states"]
        y = run(dense(hidden)) if layout is None else self.through(run, hidden, layout)
        # further outputs, such as the scores of a mixture's router, are those of the path that runs last
        return (y, *outputs[-1][1:]) if isinstance(outputs[-1], tuple) else y


class WholeHead(NamedTuple):
    """The head as one matrix [head, head_up] over what the base model gives, [base stream, up stream]."""

    weight: Tensor
    bias: Tensor | None


class ExpandedHead(ExpandedModule):
    """The head: it gives the logits of the only path, or what `Call.answer` makes of the features of all paths.

    `softcap` caps logits as the stock model does after the head, where that is too late: see `_run_stock`. Where an
    expansion adds tokens, their logits come after those of the base's, on every path.
    """

    softcap: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        call = self.running.now()
        if call.answer is not None:
            return call.answer(x)
        layout = self.layout()
        if layout is None:
            return self.base_logits(x.contiguous(), x)
        return self.through(lambda base: self.base_logits(base, x), x, layout)

    def join(self, outputs: list[list[Tensor | None]], layout: Layout) -> Tensor:
        return outputs[0][0]

    def base_logits(self, base: Tensor, unsplit: Tensor) -> Tensor:
        """Logits of the base stream, which is contiguous; `unsplit` lies in memory as the base model's features do.

        Features of last tokens alone are strided, and to their product torch adds a bias in a step of its own.
        """
        if self.bias is None or unsplit.is_contiguous():
            logits = self.run_stock(base)
        else:
            logits = functional.linear(base, self.weight) + self.bias
        new = next((rows for blocks in self.expansions.values() if (rows := blocks.rows) is not None), None)
        return logits if new is None else torch.cat((logits, product(base, new, logits)), -1)

    def whole(self, blocks: HeadBlocks) -> WholeHead:
        """The head of one expansion as one matrix over what the base model gives."""
        weight, bias, up = self.weight, self.bias, blocks.up_weight
        if blocks.rows is not None:
            weight = torch.cat((weight, blocks.rows.to(weight.dtype)))
            bias = None if bias is None else functional.pad(bias, (0, len(blocks.rows)))
        return WholeHead(weight if up is None else torch.cat((weight, up.to(weight.dtype)), 1), bias)

    def without_new_tokens(self, logits: Tensor, blocks: HeadBlocks | None) -> Tensor:
        """Logits of a path, in their own memory if they have no gradient; without rows, new tokens get probability 0.

        Their logits are so far below the largest that its exponential in float32 is 0. Infinity would make a divergence
        NaN, and a router would round away what it adds to the least number.
        """
        known = len(self.weight)
        if logits.shape[-1] == known or (blocks is not None and blocks.rows is not None):
            return logits
        is_routed = self.running.now().choice.router is not None
        least = logits[..., :known].detach().amax(-1, keepdim=True) - (NEAR if is_routed else FAR)
        if logits.requires_grad:
            return torch.cat((logits[..., :known], least.expand_as(logits[..., known:])), -1)
        logits[..., known:] = least
        return logits

    def capped(self, logits: Tensor) -> Tensor:
        """Cap logits as the stock model does."""
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def capped_in_place(self, logits: Tensor) -> Tensor:
        """Cap logits in their own memory, or in new memory where they have a gradient."""
        if self.softcap is None or logits.requires_grad:
            return self.capped(logits)
        return logits.div_(self.softcap).tanh_().mul_(self.softcap)


# kind in config.json: class of the stock module, and what an expansion adds to it
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
    """The class of an expanded module: the stock class with one of KINDS before it."""
    return type(f"{stock.__name__}WithUpStream", (kind, stock), {"__module__": __name__})


def stock_class(module: nn.Module) -> Any:
    """The class that a module had before it was expanded."""
    return type(module).__bases__[1] if isinstance(module, ExpandedModule) else type(module)


def expand_module(module: nn.Module, kind: str, running: Running, place: int) -> None:
    """Let paths pass through a stock module, in place; its stock parameters keep their names."""
    if isinstance(module, ExpandedModule):
        return
    module.__class__ = expanded_class(KINDS[kind][0], type(module))
    module.running, module.place, module.layouts, module.expansions = running, place, {}, nn.ModuleDict()


def expanded_modules(model: nn.Module) -> Iterator[ExpandedModule]:
    """Modules through which paths pass."""
    return (module for module in model.modules() if isinstance(module, ExpandedModule))
