"""Blocks: the tensors that an expansion adds to a module, and the products with them.

    [ y    ]   [ W    W12 ] [ x    ]      W    pretrained, frozen, used by the stock forward
    [ y_up ] = [ W21  W22 ] [ x_up ]      W12, W21, W22   blocks of an expansion (SCALE, arXiv 2511.03270, eq. 1)

In a gated expansion, blocks that write into the base stream or the logits read g y_up in place of y_up: see
`gate_scores`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .expanded_stock import normalise, through_gate, twin

# bytes; kernels may treat rows that begin at a multiple of a vector register differently
CACHE_LINE = 64


def dense(x: Tensor) -> Tensor:
    """Return x, or a copy without gaps in memory that keeps the order of the strides.

    Transposed features have to stay transposed, since their product may round differently. In bfloat16 that of
    recurrent blocks with a bias does.
    """
    return x if x.is_contiguous() else x.clone()


def aligned_contiguous(x: Tensor) -> Tensor:
    """Return x, dense and aligned as new memory is.

    A slice of a single row is contiguous at any offset, and on a CPU the rounding of a product of a matrix and one row
    may depend on that offset.
    """
    x = dense(x)
    is_aligned = torch.compiler.is_compiling() or x.device.type != "cpu" or x.data_ptr() % CACHE_LINE == 0
    return x if is_aligned else x.clone()


def aligned(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the tensor, contiguous and at the same offset in a cache line as `like`.

    On a CPU the order of the sums in a product of a matrix and one row, and so its rounding, depends on that offset.
    """
    has_memory = not torch.compiler.is_compiling() and tensor.device.type == like.device.type == "cpu"
    is_same = has_memory and (like.data_ptr() - tensor.data_ptr()) % CACHE_LINE == 0
    if not has_memory or tensor.dtype != like.dtype or (is_same and tensor.is_contiguous()):
        return tensor.contiguous()
    size = tensor.element_size()
    memory = tensor.new_empty(tensor.numel() + CACHE_LINE // size)
    start = (like.data_ptr() - memory.data_ptr()) % CACHE_LINE // size
    return memory[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)


def join_streams(*streams: Tensor) -> Tensor:
    """Join streams, and keep them as an attribute of the result, so that the next module need not copy them."""
    if len(streams) == 1:
        return streams[0]
    joined = torch.cat(streams, dim=-1)
    # a tensor of torch.inference_mode has no version that would tell a later change
    if not (torch.compiler.is_compiling() or joined.is_inference()):
        joined.streams = (streams, joined._version)
    return joined


def streams_of(x: Any, widths: list[int]) -> list[Tensor] | None:
    """Return the streams of these widths that a tensor was joined from; None if there are none, or it has changed."""
    streams, version = getattr(x, "streams", ((), None))
    stream_widths = streams and version == x._version and [stream.shape[-1] for stream in streams]
    if not stream_widths or stream_widths != [width for width in widths if width]:
        return None
    rest = iter(streams)
    return [next(rest) if width else x[..., :0] for width in widths]


def product(x: Tensor, block: Tensor, like: Tensor) -> Tensor:
    """Multiply by an expansion block in the block's dtype; the result has the dtype of `like`."""
    # for a single token, a cast that changes nothing costs a tenth of the product
    y = functional.linear(x if x.dtype == block.dtype else x.to(block.dtype), block)
    return y if y.dtype == like.dtype else y.to(like.dtype)


def add_new_product(y: Tensor, x: Tensor, block: Tensor) -> Tensor:
    """Add the product by an expansion block to y, in memory of its own."""
    return y + product(x, block, y)


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
    """Add the product by an expansion block to y: in place if nothing has to be cast, since logits are large."""
    is_cast = not y.dtype == x.dtype == block.dtype or torch.is_autocast_enabled(y.device.type)
    if is_cast or torch.compiler.is_compiling() or not y.is_contiguous():
        return add_new_product(y, x, block)
    if torch.is_grad_enabled():
        return AddProduct.apply(y, x, block)
    # AddProduct itself costs as much as a small product
    y.flatten(0, -2).addmm_(x.flatten(0, -2), block.t())
    return y


def is_row(x: Tensor, like: Tensor) -> bool:
    """Return whether x is a single token in float32 on a CPU, and autograd needs nothing of it."""
    is_float = x.dtype == like.dtype == torch.float32 and x.is_cpu and x.numel() == x.shape[-1]
    is_free = is_float and not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"))
    return is_free and not torch.compiler.is_compiling()


def row_up(x: Tensor, x_up: Tensor, w21: Tensor, w22: Tensor | None, bias: Tensor | None) -> Tensor:
    """Compute W21 x + W22 x_up + bias of single rows x (n,) and x_up (m,).

    For a single token, products of matrices cost mostly overhead; with 8 expansions this saves 6 % of a token.
    """
    y_up = torch.mv(w21, x) if w22 is None else torch.mv(w21, x).addmv_(w22, x_up)
    return y_up if bias is None else y_up.add_(bias)


class Blocks(nn.Module):
    """Tensors that one expansion adds to a stock module, and the computation of its up stream.

    Attributes:
        group_of: Group of each tensor, by which training is chosen and counted.
        up_in: Features, or heads, of the up stream that the module reads.
        up_sections: Widths of its output, for each section of a fused projection.
        replaces_base: Whether a trained copy of the base weight takes its place if W12 exists.
    """

    group_of: dict[str, str] = {"gate": "gates"}
    replaces_base = False

    def __init__(self, stock: nn.Module, spec: dict[str, Any], up_in: int = 0) -> None:
        super().__init__()
        # not by nn.Module, which would list the stock module as a part of this one
        self.__dict__["stock"] = stock
        self.up_in, self.up_sections = up_in, []

    def forward(self, base: Tensor, up: Tensor, y: Tensor | None, has_w12: bool) -> tuple[Tensor, Tensor | None]:
        """Compute both streams of a path.

        Args:
            base: Base stream that the module reads.
            up: Up stream that it reads.
            y: Output of the stock module for the base stream; None if a trained copy takes its place.
            has_w12: Whether W12 exists for this path.

        Returns:
            The output for the base stream, and the up stream or None.
        """
        # the gate is read in here, since accelerate brings offloaded tensors for a forward only
        return self.new_rows if base is None else self.compute(base, self.read(base, up), y, has_w12)

    def rows_of_new_tokens(self) -> Tensor | None:
        """Return the rows of new tokens, or None."""
        rows: Tensor | None = getattr(self, "new_rows", None)
        # offloaded rows come with a forward
        return rows if rows is None or not rows.is_meta else self(None, None, None, False)

    def compute(self, base: Tensor, up: Tensor, y: Tensor | None, has_w12: bool) -> tuple[Tensor, Tensor | None]:
        """Compute both streams of a path from a gated up stream; see `forward`."""
        raise NotImplementedError

    def read(self, base: Tensor, up: Tensor) -> Tensor:
        """Return the up stream after the gate of these blocks, if they have one."""
        return through_gate(self, base, up, up)

    def add_tensors(self, dtype: str | None, shapes: dict[str, tuple[int, ...]]) -> None:
        """Add tensors, zero until they are loaded, in `dtype` or in that of the stock weight; skip empty ones."""
        like = next(self.stock.parameters(), torch.empty(()))
        # a quantised weight may be of integers, and cannot make tensors that are not quantised
        stored = like.dtype if like.dtype.is_floating_point else torch.get_default_dtype()
        kind = getattr(torch, dtype) if dtype else stored
        for name, shape in shapes.items():
            made = None if 0 in shape else nn.Parameter(torch.zeros(shape, dtype=kind, device=like.device))
            self.register_parameter(name, made)

    def align(self) -> None:
        """Move each tensor to the start of a cache line; loaders leave it at its offset in a file.

        On a CPU the rounding of a product of a matrix and one row may depend on that offset.
        """
        for block in self._parameters.values():
            if block is not None:
                block.data = aligned_contiguous(block.data)


class LinearBlocks(Blocks):
    """Blocks of a linear (or Conv1D); rows of a block are outputs, in both storage orders.

    A preservation layer has no W12, which makes it exactly zero.
    """

    group_of = Blocks.group_of | {"w12": "w12", "w21": "w21", "w22": "w22", "up_bias": "biases"}

    def __init__(self, stock, spec, up_in):
        super().__init__(stock, spec, up_in)
        self.up_sections = [up for _, up in spec["out_features"]]

    def compute(self, base: Tensor, up: Tensor, y: Tensor | None, has_w12: bool) -> tuple[Tensor, Tensor | None]:
        # looked up once, since for a single token a lookup costs as much as a small product
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
            # in place if autograd needs no old value
            y = (add_new_product if torch.is_grad_enabled() else add_product)(y, up, w12)
        return y, y_up


class GrownBlocks(LinearBlocks):
    """Blocks of a grown MLP (Grow, Don't Overwrite, arXiv 2603.08647), which are initially copies of the base.

        gate, up    y      = W x             with `trains_base`, a trained copy `w11` (and `bias11`) in place of W
                    y_up   = W21 x           W21 is initially W, once for each new copy
        down        y      = c W x + W12 x_up + b       c = `share`, 1 over the number of copies; W12 is initially c W

    The stock module's own operation computes the copies, on memory that is aligned as the base's. So two equal halves
    are bit for bit those of the base, and halving and adding them rounds nothing.
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
        """Compute what the stock module would with this block, whose rows are outputs, and this bias."""
        x, bias = x.to(block.dtype), None if bias is None else bias.to(block.dtype)
        if isinstance(self.stock, nn.Linear):
            # some stock classes add the bias in a step of its own
            return twin(self.stock, weight=block, bias=bias).run_stock(x).to(like.dtype)
        # Conv1D stores (inputs, outputs), and the rounding of a product depends on the strides of its operands
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

    `style` is that of the stock norm: see `normalise`. It adds a bias if the stock norm does. It always has a gain,
    even if the stock norm has none.
    """

    group_of = {"up_weight": "norms", "up_bias": "norms"}

    def __init__(self, stock, spec, up_in):
        super().__init__(stock, spec, up_in)
        self.style, self.epsilon = spec["style"], spec["epsilon"]

    def compute(self, base: Tensor, up: Tensor, y: Tensor | None, has_w12: bool) -> tuple[Tensor, Tensor | None]:
        bias = None if self.up_bias is None else self.up_bias.float()
        return y, normalise(up.float(), self.style, self.epsilon, self.up_weight.float(), bias).to(y.dtype)


class EmbeddingBlocks(Blocks):
    """Added columns of an embedding, scaled as the stock ones are; rows of new tokens have them too."""

    group_of = {"up_weight": "embedding", "new_rows": "new_tokens"}

    def compute(self, base: Tensor, up: Tensor, y: Tensor | None, has_w12: bool) -> tuple[Tensor, Tensor | None]:
        if self.up_weight is None:
            return y, None
        # `base` are token ids, some of which may be of tokens that another expansion adds
        known, rows = len(self.up_weight), len(self.stock.weight)
        is_other = base >= known if known == rows and self.stock.new_rows() is not None else None
        ids = base if is_other is None else base.masked_fill(is_other, 0)
        y_up = functional.embedding(ids, self.up_weight, self.stock.padding_idx).to(y.dtype)
        y_up = y_up if is_other is None else y_up.masked_fill(is_other[..., None], 0)
        scale = getattr(self.stock, "embed_scale", None)
        if scale is None:
            return y, y_up
        return y, y_up * (scale.to(y_up.dtype) if isinstance(scale, Tensor) else scale)


class HeadBlocks(Blocks):
    """Added columns of the head: logits + head_up x_up. head_up is `up_weight`, initially zero, and never tied.

    `embedding` has the rows of new tokens if the base's head is tied to it.
    """

    group_of = Blocks.group_of | {"up_weight": "head", "new_rows": "new_tokens"}

    @property
    def rows(self) -> Tensor | None:
        """Rows of new tokens, or None."""
        embedding = self.__dict__.get("embedding")
        return (self if embedding is None else embedding).rows_of_new_tokens()

    def forward(self, base, up, y, has_w12, is_read=False):
        if base is None:
            return self.new_rows
        # a router has each path read once, without logits (y is None), and may multiply it several times
        read = up if is_read else self.read(base, up)
        return (None, read) if y is None else self.compute(base, read, y, has_w12)

    def compute(self, base: Tensor, up: Tensor, y: Tensor | None, has_w12: bool) -> tuple[Tensor, Tensor | None]:
        if self.up_weight is None:
            return y, None
        known = len(self.up_weight)
        # in the memory of the base stream's logits, which are large; logits of another's new tokens come after them
        whole = add_product(y if y.shape[-1] == known else y[..., :known], up, self.up_weight)
        return whole if y.shape[-1] == known else torch.cat((whole, y[..., known:]), -1), None


class SameBlocks(Blocks):
    """Blocks of a module that treats an up stream as a base stream: an activation, or a norm inside each head.

    It runs once for each stream, since vector and tail lanes of one kernel may round differently.
    """

    def compute(self, base: Tensor, up: Tensor, y: Tensor | None, has_w12: bool) -> tuple[Tensor, Tensor | None]:
        return y, self.stock.run_stock(up)


class PassingBlocks(Blocks):
    """Blocks of a module that gets none: it reads the base stream alone, with `up_out` zeros beside its output.

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

    The router of a mixture of experts sees the base stream alone. Without `inner` the up stream only passes.
    """

    group_of = Blocks.group_of | {"w12": "w12", "w21": "w21", "w22": "w22", "up_weight": "w22"}

    def __init__(self, stock, spec, up_in):
        super().__init__(stock, spec, up_in)
        self.base_width, self.up_out = spec["base"], spec["up"]

    def read(self, base: Tensor, up: Tensor) -> Tensor:
        """Return the up stream as it is: the gate acts on h, which W12 reads here."""
        return up

    def compute(self, base: Tensor, up: Tensor, y: Tensor | None, has_w12: bool) -> tuple[Tensor, Tensor | None]:
        if self.w21 is None:
            return y, y.new_zeros(*y.shape[:-1], self.up_out)
        h = product(base, self.w21, y)
        h = functional.silu(h if self.w22 is None else h + product(up, self.w22, y))
        h = through_gate(self, base, up, h)
        y_up = y.new_zeros(*y.shape[:-1], 0) if self.up_weight is None else product(h, self.up_weight, y)
        return add_new_product(y, h, self.w12) if has_w12 and self.w12 is not None else y, y_up
