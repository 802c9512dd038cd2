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

from collections.abc import Callable, Sequence
from functools import cache
from inspect import signature
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .expanded_streams import (
    CACHE_LINE,
    Streams,
    add_new_product,
    add_product,
    is_row,
    join,
    own_memory,
    product,
    row_up,
    stack,
    streams_of,
)

# parameters of a forward that keeps a cache
CACHES = {"past_key_values", "past_key_value", "layer_past", "cache_params", "cache"}
EXPANSION_NAMES = ("w12", "w21", "w22", "w11", "up_weight", "up_bias", "bias11")


class View:
    """An object seen with some values of its own; everything else is read live from the object."""

    def __init__(self, viewed: Any, own: dict[str, Any]) -> None:
        self.__dict__.update(own, viewed=viewed)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "viewed":
            raise AttributeError(name)
        return getattr(self.viewed, name)


class ExpandedModule:
    """A stock module with an up stream; the second base class of every expanded module.

    Below the first collaborative layer nothing that trains reaches the base stream, so no gradient has to pass
    through it: there `base_detached` is set, and training costs what the up stream costs. Where `is_enabled` is
    not set, the module is the stock module.

    From the first collaborative layer on, a routed model carries two paths side by side: [preserve | adapt]. The
    preserve path is the base stream alone, or with an up stream of its own where `keeps_up` is set; W12 does not
    exist for it.
    """

    base_detached = False
    is_enabled = True
    # whether two paths pass through the module where the model routes, and whether they do now
    can_route = False
    is_routed = False
    keeps_up = False
    is_last = False
    # features of the base stream that the module reads; None where all that it reads is one path
    base_in: int | None = None
    # widths of base and up outputs, section by section; only a fused projection has several
    sections: list[list[int]] = [[]]
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

    def forward_expanded(self, x: Tensor) -> Tensor:
        """Each path by itself: no operation sees more of the base stream than in the base model."""
        paths = self.split(x)
        adapted = self.forward_streams(*paths[-1])
        return self.join([self.forward_preserve(*paths[0]), adapted] if self.is_routed else [adapted])

    def forward_preserve(self, base: Tensor, up: Tensor) -> Streams:
        """The preserve path, in which W12 does not exist."""
        return self.forward_streams(base, up) if self.keeps_up else (self.forward_stock(base), None)

    def forward_streams(self, base: Tensor, up: Tensor) -> Streams:
        """One path with both streams."""
        y_base = self.forward_stock(base)
        return y_base, self.forward_up(base, up, y_base)

    def forward_up(self, x_base: Tensor, x_up: Tensor, like: Tensor) -> Tensor | None:
        """Up part of the output without W12, where the base part `like` is known; None where there is none."""
        raise NotImplementedError

    def join(self, paths: list[Streams]) -> Tensor:
        """Put the results of all paths side by side; what leaves the last norm is stacked."""
        return stack(paths) if self.is_last and self.is_routed else join(paths, self.sections)

    def widths(self, width: int) -> list[int]:
        """Widths of base and up part of each path, of all that the module reads."""
        base = self.base_in or (width // 2 if self.is_routed else width)
        if not self.is_routed:
            return [base, width - base]
        return [base, width // 2 - base] * 2 if self.keeps_up else [base, 0, base, width - 2 * base]

    def split(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Split the last axis into base part and up part of each path.

        A base part has memory of its own, because kernels may choose their path by the strides of an operand.
        """
        widths = self.widths(x.shape[-1])
        known = streams_of(x, widths)
        parts = known or x.split(widths, dim=-1)
        # a copy of the up part is what backward keeps, and not the joined tensor
        copied = known or [own_memory(part) if index % 2 else part.clone() for index, part in enumerate(parts)]
        return self.paired(copied)

    def paired(self, parts: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Base and up part of each path; no gradient goes where nothing that trains has been."""
        bases = list(parts[::2])
        if bases[0].requires_grad and (self.base_detached or self.is_routed):
            bases[0] = bases[0].detach()
        return list(zip(bases, parts[1::2], strict=True))

    def add_parameter(self, name: str, *shape: int, dtype: str | None) -> None:
        """Add one expansion tensor, zero until it is loaded, in `dtype` or in the dtype of the stock weight."""
        like = self.like()
        kind = getattr(torch, dtype) if dtype else like.dtype
        self.register_parameter(name, nn.Parameter(like.new_zeros(shape, dtype=kind)))

    def like(self) -> Tensor:
        """A tensor of the stock module's dtype on its device: a norm may have no weight, and a block many."""
        floating = (own for own in self.parameters() if own.is_floating_point())
        return next(floating, torch.empty(()))

    def check_paths(self) -> None:
        """Refuse, where a model routes, what two paths cannot pass through."""

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

    def forward_streams(self, base: Tensor, up: Tensor) -> Streams:
        y_base, y_up = self.forward_preserve_streams(base, up)
        if self.w12 is None:
            return y_base, y_up
        # in place where nothing remembers what it was
        add = add_product if not torch.is_grad_enabled() else add_new_product
        return add(y_base, up, self.w12), y_up

    def forward_preserve(self, base: Tensor, up: Tensor) -> Streams:
        return self.forward_preserve_streams(base, up) if self.keeps_up else (self.forward_stock(base), None)

    def forward_preserve_streams(self, base: Tensor, up: Tensor) -> Streams:
        """Both streams without W12."""
        y_base = self.forward_stock(base)
        return y_base, self.forward_up(base, up, y_base)

    def forward_up(self, x_base: Tensor, x_up: Tensor, like: Tensor) -> Tensor | None:
        """Up part of the output, W21 x + W22 x_up + bias, or None where the output is not widened."""
        # each is looked up once: a token at a time, that costs as much as a small product
        w21, w22, bias = self.w21, self.w22, self.up_bias
        if w21 is None:
            return None
        if w21.dtype == like.dtype and is_row(x_base, like):
            return row_up(x_base.view(-1), x_up.view(-1), w21, w22, bias).view(*like.shape[:-1], -1)
        y_up = product(x_base, w21, like)
        if w22 is not None:
            y_up = add_product(y_up, x_up, w22)
        return y_up if bias is None else y_up + bias.to(like.dtype)


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


class GrownLinear(ExpandedLinear):
    """A linear of a grown MLP (Grow, Don't Overwrite, arXiv 2603.08647): what is new begins as copies of the base.

        gate, up    y      = W x             a trained copy `w11` (and `bias11`) in place of W where `trains_base`
                    y_up   = W21 x           W21 begins as W, once for each new copy
        down        y      = c W x + W12 x_up + b       c = `share`, 1 over the number of copies; W12 begins as c W

    Copies are computed by the stock module's own operation, on memory that is aligned as the base's, so that two equal
    halves are bit for bit those of the base, and halving and adding them rounds nothing.
    """

    groups = ExpandedLinear.groups | {"w11": "w11", "bias11": "biases"}

    def configure(self, in_features, out_features, collaborative, dtype, share=1.0, trains_base=False):
        super().configure(in_features, out_features, collaborative, dtype)
        self.share, width = share, sum(base for base, _ in out_features)
        shapes = {"w11": (width, in_features[0]), "bias11": (width,)} if trains_base else {}
        for name in ("w11", "bias11"):
            if name in shapes and not (name == "bias11" and self.bias is None):
                self.add_parameter(name, *shapes[name], dtype=dtype)
            else:
                self.register_parameter(name, None)

    def forward_streams(self, base: Tensor, up: Tensor) -> Streams:
        y_base = self.forward_stock(base) if self.w11 is None else self.copied(base, self.w11, self.bias11, base)
        if self.w12 is not None:
            bias = None if self.bias is None else self.bias * (1 - self.share)
            y_base = torch.add(self.copied(up, self.w12, bias, y_base), y_base, alpha=self.share)
        return y_base, self.forward_up(base, up, y_base)

    def forward_up(self, x_base: Tensor, x_up: Tensor, like: Tensor) -> Tensor | None:
        return None if self.w21 is None else self.copied(x_base, self.w21, self.up_bias, like)

    def copied(self, x: Tensor, block: Tensor, bias: Tensor | None, like: Tensor) -> Tensor:
        """What the stock module would compute with this block, whose rows are outputs, and this bias."""
        x, bias = x.to(block.dtype), None if bias is None else bias.to(block.dtype)
        if isinstance(self, nn.Linear):
            # some stock classes add the bias in a step of its own
            stock: Any = type(self).__bases__[1]
            return stock.forward(View(self, {"weight": block, "bias": bias}), x).to(like.dtype)
        # Conv1D stores (inputs, outputs), and a product reads its operands in the order in which they lie
        rows = torch.addmm(bias, x.reshape(-1, x.shape[-1]), aligned(block.t(), self.weight))
        return rows.view(*x.shape[:-1], -1).to(like.dtype)

    def align_copies(self) -> None:
        """Put the blocks where they are aligned as the base weight: loaders leave tensors where they lie in a file."""
        for name in ("w11", "w12", "w21"):
            block = self._parameters.get(name)
            if block is not None:
                block.data = aligned(block.data, self.weight)


def own_thread() -> int:
    """A number of the running thread; a graph has no threads."""
    return 0 if torch.compiler.is_compiling() else get_ident()


class ExpandedHead(ExpandedModule):
    """The head: logits = head x + head_up x_up, where head_up is `up_weight`, zero at first, never tied.

    Where a model routes, the head is asked for other than the logits of one path, by each thread for itself: a
    function in `answers` gets the features of both paths, one after the other along the batch. `softcap` is set where
    the stock model would cap the logits after the head, which is too late for a router.
    """

    groups = {"up_weight": "head"}
    softcap: float | None = None

    def configure(self, base, up, dtype):
        self.base_in, self.answers = base, {}
        if up:
            self.add_parameter("up_weight", self.weight.shape[0], up, dtype=dtype)
        else:
            self.register_parameter("up_weight", None)

    def forward(self, x: Tensor) -> Tensor:
        answer = self.answers.get(own_thread())
        if answer is not None:
            return answer(x)
        logits = self.forward_expanded(x) if self.is_enabled else self.base_logits(x.contiguous(), x)
        return self.capped_in_place(logits)

    def forward_expanded(self, x: Tensor) -> Tensor:
        ((base, up),) = self.split(x)
        return self.add_up(self.base_logits(base, x), up)

    def base_logits(self, base: Tensor, read: Tensor) -> Tensor:
        """Logits of the base stream, which is contiguous; `read` lies in memory as the base model's features do.

        Features of last tokens alone are strided, and to their product torch adds a bias in a step of its own.
        """
        if self.bias is None or read.is_contiguous():
            return self.forward_stock(base)
        return functional.linear(base, self.weight) + self.bias

    def add_up(self, logits: Tensor, up: Tensor) -> Tensor:
        """Add head_up x_up to the logits of the base stream."""
        return logits if self.up_weight is None else add_product(logits, up, self.up_weight)

    def capped(self, logits: Tensor) -> Tensor:
        """Cap logits as the stock model does."""
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def capped_in_place(self, logits: Tensor) -> Tensor:
        """The same in the memory of the logits, which are large; where they have a gradient, in memory of their own."""
        if self.softcap is None or logits.requires_grad:
            return self.capped(logits)
        return logits.div_(self.softcap).tanh_().mul_(self.softcap)


class ExpandedEmbedding(ExpandedModule):
    """An embedding with added columns, which take the same scale as the stock ones where there is one."""

    groups = {"up_weight": "embedding"}

    def configure(self, up, dtype):
        self.add_parameter("up_weight", self.weight.shape[0], up, dtype=dtype)

    def forward_expanded(self, ids: Tensor) -> Tensor:
        base = self.forward_stock(ids)
        return torch.cat((base, self.forward_up(ids, ids, base)), dim=-1)

    def forward_up(self, x_base: Tensor, x_up: Tensor, like: Tensor) -> Tensor:
        """The added columns of token ids, which are no stream."""
        up = functional.embedding(x_base, self.up_weight, self.padding_idx).to(like.dtype)
        scale = getattr(self, "embed_scale", None)
        return up if scale is None else up * (scale.to(up.dtype) if isinstance(scale, Tensor) else scale)


class ExpandedNorm(ExpandedModule):
    """A split norm: each stream is normalised by its own statistics.

    `style` is "rms" (gain w), "layer" (mean, variance, gain, bias), or one of them with "_plus_one" (gain 1 + w). The
    stock norm may have no gain; that of the up stream has one.
    """

    groups = {"up_weight": "norms", "up_bias": "norms"}

    def configure(self, base, up, style, epsilon, dtype):
        self.base_in, self.up_style, self.up_epsilon = base, style, epsilon
        self.add_parameter("up_weight", up, dtype=dtype)
        if getattr(self, "bias", None) is not None:
            self.add_parameter("up_bias", up, dtype=dtype)

    def forward_up(self, x_base: Tensor, x_up: Tensor, like: Tensor) -> Tensor:
        """Norm of the up stream, computed in float32."""
        bias = self._parameters.get("up_bias")
        y_up = self.normalise(x_up.float(), self.up_weight.float(), None if bias is None else bias.float())
        return y_up.to(like.dtype)

    def normalise(self, x: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
        """The norm of one stream, in the style of the stock norm."""
        gain = gain + 1.0 if self.up_style.endswith("_plus_one") else gain
        if self.up_style.startswith("layer"):
            return functional.layer_norm(x, gain.shape, gain, bias, self.up_epsilon)
        return functional.rms_norm(x, gain.shape, gain, self.up_epsilon)


class ExpandedHeadNorm(ExpandedModule):
    """A norm inside each head, shared by old and new heads; `heads` old ones come first on axis `axis`."""

    # its result lies in memory as its input does, and attention chooses its path by that
    keeps_strides = True

    def configure(self, heads, axis):
        self.base_in, self.head_axis = heads, axis

    def split(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        parts = x.split(self.widths(x.shape[self.head_axis]), self.head_axis)
        # clone() keeps the order of strides, so the old heads lie in memory as they do in the base model
        return self.paired([part.clone() for part in parts])

    def forward_up(self, x_base: Tensor, x_up: Tensor, like: Tensor) -> Tensor:
        return self.forward_stock(x_up)

    def join(self, paths: list[Streams]) -> Tensor:
        parts = [part.movedim(self.head_axis, -2) for path in paths for part in path if part is not None]
        return torch.cat(parts, dim=-2).movedim(-2, self.head_axis)


class ExpandedActivation(ExpandedModule):
    """An activation run on each stream alone: vector and tail lanes of one kernel may round differently."""

    keeps_strides = True

    def configure(self, base):
        self.base_in = base

    def forward_up(self, x_base: Tensor, x_up: Tensor, like: Tensor) -> Tensor:
        return self.forward_stock(x_up)

    def split(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        if x.is_contiguous():
            return super().split(x)
        # a chunk of a fused projection is strided in the base model too, and must stay so here
        return self.paired(x.split(self.widths(x.shape[-1]), dim=-1))


class PassingModule(ExpandedModule):
    """A stock module that has no block of its own.

    At the border of the residual stream in a layer that was not chosen it reads only the `base` features (None: all
    that it reads is base) and writes `up` zeros, so the up stream passes through the layer's residual connection
    unchanged. Where a model routes, every module of a layer has to take both paths; `sections` are then the parts of
    a fused projection.
    """

    def configure(self, base, up, sections=None):
        self.base_in, self.up_out = base, up
        self.sections = [[size, 0] for size in sections] if sections else [[]]

    def forward_expanded(self, x: Tensor) -> Tensor:
        if self.is_routed:
            return super().forward_expanded(x)
        y = self.forward_stock(x if self.base_in is None else self.base_part(x))
        # padding would fill all of the result with zeros first
        return torch.cat((y, y.new_zeros(*y.shape[:-1], self.up_out)), dim=-1) if self.up_out else y

    def base_part(self, x: Tensor) -> Tensor:
        """The base stream of what it reads."""
        return self.split(x)[0][0]

    def forward_up(self, x_base: Tensor, x_up: Tensor, like: Tensor) -> Tensor | None:
        return like.new_zeros(*like.shape[:-1], self.up_out) if self.up_out else None


class ExpandedBlock(ExpandedModule):
    """A whole block of a layer, run as it is on the base stream, with a small dense MLP beside it.

        y = block(x) + W12 h      y_up = V h      h = silu(W21 x + W22 x_up), of `inner` features; V is `up_weight`

    Without `inner` the block only lets the up stream pass. A mixture's router sees the base stream alone.
    """

    groups = {"w12": "w12", "w21": "w21", "w22": "w22", "up_weight": "w22"}

    def configure(self, base, up, inner=0, collaborative=False, dtype=None):
        self.base_in, self.up_out = base, up
        shapes = {
            "w12": (base, inner if collaborative else 0),
            "w21": (inner, base),
            "w22": (inner, up),
            "up_weight": (up, inner),
        }
        for name, shape in shapes.items():
            if 0 in shape:
                self.register_parameter(name, None)
            else:
                self.add_parameter(name, *shape, dtype=dtype)

    def check_paths(self) -> None:
        held = CACHES.intersection(signature(super(ExpandedModule, self).forward).parameters)
        if held:
            raise ValueError(
                f"config.json: scale_surgery.routing lets two paths pass through {type(self).__name__}, which keeps "
                f"a cache ({', '.join(sorted(held))}) and runs as a whole, expected none that does. Export the model "
                "without a router, or expand another part of these layers."
            )

    def forward(self, *args, **kwargs):
        stock, found = super(ExpandedModule, self).forward, []

        def run(base: Tensor) -> Tensor:
            found.append(stock(base, *args[1:], **kwargs) if args else stock(**(kwargs | {"hidden_states": base})))
            return found[-1][0] if isinstance(found[-1], tuple) else found[-1]

        hidden = args[0] if args else kwargs["hidden_states"]
        y = self.forward_paths(run, hidden) if self.is_enabled else run(hidden.contiguous())
        # what else it gives, such as the scores of a mixture's router, is the adapt path's, which runs last
        return (y, *found[-1][1:]) if isinstance(found[-1], tuple) else y

    def forward_paths(self, run: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Each path by itself."""
        *first, (base, up) = self.split(hidden)
        preserved = [
            self.stream(run, *path, None) if self.keeps_up else (self.rows(run, path[0]), None) for path in first
        ]
        return self.join([*preserved, self.stream(run, base, up, self.w12)])

    def rows(self, run: Callable[[Tensor], Tensor], base: Tensor) -> Tensor:
        """What the block gives for the base stream, as features of each token: some blocks lay all tokens in a row."""
        return run(base).view(*base.shape[:-1], -1)

    def forward_up(self, x_base: Tensor, x_up: Tensor, like: Tensor) -> Tensor | None:
        return self.stream(lambda _: like, x_base, x_up, None)[1]

    def stream(self, run: Callable[[Tensor], Tensor], base: Tensor, up: Tensor, w12: Tensor | None) -> Streams:
        """Both streams of one path."""
        y = self.rows(run, base)
        if self.w21 is None:
            return y, y.new_zeros(*y.shape[:-1], self.up_out)
        h = product(base, self.w21, y)
        h = functional.silu(h if self.w22 is None else h + product(up, self.w22, y))
        y_up = y.new_zeros(*y.shape[:-1], 0) if self.up_weight is None else product(h, self.up_weight, y)
        return y if w12 is None else add_new_product(y, h, w12), y_up


class ExpandedPadding(ExpandedModule):
    """A module that reads no hidden state, such as a position embedding; zeros stand beside what it gives."""

    groups = {}

    def configure(self, up):
        self.up_out = up

    def forward(self, *args, **kwargs):
        y = super(ExpandedModule, self).forward(*args, **kwargs)
        return torch.cat((y, y.new_zeros(*y.shape[:-1], self.up_out)), dim=-1) if self.is_enabled else y


KINDS = {
    "block": ExpandedBlock,
    "padding": ExpandedPadding,
    "linear": ExpandedLinear,
    "grown": GrownLinear,
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


def expand_module(module: nn.Module, kind: str | type, **sizes: Any) -> None:
    """Turn a stock module into an expanded one in place; its stock parameters keep their names.

    Raises:
        ValueError: If layers share the module, and would expand it in different ways.
    """
    expanded = KINDS[kind] if isinstance(kind, str) else kind
    if isinstance(module, ExpandedModule):
        # one activation may serve all layers
        if expanded is ExpandedActivation is type(module).__bases__[0] and sizes == {"base": module.base_in}:
            return
        raise ValueError(
            f"config.json: scale_surgery expands one {type(module).__bases__[1].__name__} in two ways, expected "
            "layers that share a module to be expanded alike. Was it changed by hand?"
        )
    module.__class__ = expanded_class(expanded, type(module))
    module.configure(**sizes)
