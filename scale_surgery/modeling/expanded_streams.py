"""Streams of the hidden state: products with expansion blocks, alignment in memory, and joining."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def product(x: Tensor, block: Tensor, like: Tensor) -> Tensor:
    """Multiply by an expansion block in the block's dtype; the result has the dtype of `like`."""
    # a token at a time, a cast that changes nothing costs a tenth of the product
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
    """Add the product by an expansion block to y: in place where nothing has to be cast, since logits are large."""
    is_cast = not y.dtype == x.dtype == block.dtype or torch.is_autocast_enabled(y.device.type)
    if is_cast or torch.compiler.is_compiling() or not y.is_contiguous():
        return add_new_product(y, x, block)
    if torch.is_grad_enabled():
        return AddProduct.apply(y, x, block)
    # the same without what autograd needs, which costs as much as a small product
    y.flatten(0, -2).addmm_(x.flatten(0, -2), block.t())
    return y


def is_row(x: Tensor, like: Tensor) -> bool:
    """Whether x is one token in float32 on a CPU, of which nothing remembers what is computed."""
    is_float = x.dtype == like.dtype == torch.float32 and x.is_cpu and x.numel() == x.shape[-1]
    is_free = is_float and not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"))
    return is_free and not torch.compiler.is_compiling()


def row_up(x: Tensor, x_up: Tensor, w21: Tensor, w22: Tensor | None, bias: Tensor | None) -> Tensor:
    """W21 x + W22 x_up + bias of single rows x (n,) and x_up (m,).

    A token at a time, what a product of matrices does around it costs as much as a small product itself.
    """
    y_up = torch.mv(w21, x) if w22 is None else torch.mv(w21, x).addmv_(w22, x_up)
    return y_up if bias is None else y_up.add_(bias)


# bytes; kernels may treat rows that begin at a multiple of a vector register differently
CACHE_LINE = 64


def dense(x: Tensor) -> Tensor:
    """x, or a copy whose elements lie in the order in which they lay, without what lay between them.

    What a block transposed has to stay so: a product of transposed features may round in another way, as that of
    recurrent blocks with a bias does in bfloat16.
    """
    return x if x.is_contiguous() else x.clone()


def aligned_contiguous(x: Tensor) -> Tensor:
    """x, dense and aligned as new memory is.

    A slice of a single row is contiguous where it lies, and on a CPU the product of a matrix and one row may round by
    where that begins.
    """
    x = dense(x)
    is_aligned = torch.compiler.is_compiling() or x.device.type != "cpu" or x.data_ptr() % CACHE_LINE == 0
    return x if is_aligned else x.clone()


def join_streams(*streams: Tensor) -> Tensor:
    """Join streams; the result refers to them, so that the next module need not copy them out of it."""
    if len(streams) == 1:
        return streams[0]
    joined = torch.cat(streams, dim=-1)
    # a tensor of torch.inference_mode does not know whether it was changed since
    if not (torch.compiler.is_compiling() or joined.is_inference()):
        joined.streams = (streams, joined._version)
    return joined


def streams_of(x: Any, widths: list[int]) -> list[Tensor] | None:
    """The streams of these widths that a tensor was joined from; None where it was not, or was changed since."""
    streams, version = getattr(x, "streams", ((), None))
    stream_widths = streams and version == x._version and [stream.shape[-1] for stream in streams]
    if not stream_widths or stream_widths != [width for width in widths if width]:
        return None
    rest = iter(streams)
    return [next(rest) if width else x[..., :0] for width in widths]
