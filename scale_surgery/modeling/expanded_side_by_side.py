"""Several expansions of one base side by side: what is the base's is computed once, beside it each has its up stream.

    [x | x_up of A | x_up of B | ... | x' of C, x_up of C | ...]

Some share the base stream, others stand apart with a base stream of their own, x': see `expanded_arranged`. Each
expansion's own modules compute what is its own; a stock module runs once for all that share the base stream, and once
more for each that stands apart. Heads lie as features do, so that one stock cache holds the base's heads once.
This file needs only torch and transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .expanded_modules import (
    ExpandedActivation,
    ExpandedBlock,
    ExpandedLinear,
    ExpandedModule,
    ExpandedNorm,
    expanded_class,
)
from .expanded_streams import CACHE_LINE, is_row, join_streams, own_memory, row_up, streams_of


class PathThrough(NamedTuple):
    """An expansion as it passes through a stock module.

    Attributes:
        module: The module of that name of the expanded model, on the same weights; it may be a stock one.
        up_in: Features, or heads, of its up stream that the module reads.
        is_apart: Whether the expansion has a base stream of its own here.
    """

    module: nn.Module
    up_in: int
    is_apart: bool

    def up(self, base: Tensor, up: Tensor, y: Tensor) -> Tensor | None:
        """Up part beside a base part y that is known."""
        return self.module.forward_up(base, up, y) if isinstance(self.module, ExpandedModule) else None

    def streams(self, run: Callable[[Tensor], Tensor], base: Tensor, up: Tensor) -> tuple[Tensor, Tensor | None]:
        """Both streams of an expansion that stands apart; `run` is the stock module."""
        if isinstance(self.module, ExpandedBlock):
            return self.module.stream(run, base, up, self.module.w12)
        if isinstance(self.module, ExpandedModule):
            return self.module.forward_streams(base, up)
        return run(base), None

    @property
    def up_sections(self) -> list[int]:
        """Widths of what it writes, for each section of a fused projection."""
        return [sizes[1] for sizes in self.module.sections]


class ComposedModule:
    """A stock module through which several expansions pass; the second base class of such a module.

    Attributes:
        shared: Those that share the base stream.
        apart: Those that stand apart.
        known_widths: Widths of all that it reads, by their sum.
        base_sections: Widths of the parts of a fused projection; empty where it is none.
        head_axis: Axis of the heads of a norm inside heads, None for any other module.
        keeps_strides: Whether its result lies in memory as its input does.
        stacked_width: Width to which paths are padded, to leave the last norm one after the other along the batch;
            None for any other module.
    """

    shared: tuple[PathThrough, ...] = ()
    apart: tuple[PathThrough, ...] = ()
    known_widths: dict[int, list[int]] = {}
    base_sections: tuple[int, ...] = ()
    head_axis: int | None = None
    keeps_strides = False
    stacked_width: int | None = None

    def look_up(self) -> None:
        """Keep at hand what every token needs."""

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_paths(super().forward, x)

    def forward_paths(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Every path by itself: no operation sees more of a base stream than in the base model."""
        base, *parts = self.split(x)
        y = run(base)
        shared = len(self.shared)
        return self.join([[y, *self.ups(base, parts[:shared], y)], *self.streams_apart(run, parts[shared:])])

    def streams_apart(self, run: Callable[[Tensor], Tensor], parts: Sequence[Tensor]) -> list[list[Tensor | None]]:
        """Streams of those that stand apart."""
        own = iter(parts)
        return [list(path.streams(run, next(own), next(own))) for path in self.apart]

    def ups(self, base: Tensor, ups: Sequence[Tensor], y: Tensor) -> list[Tensor | None]:
        """Up parts of those that share the base stream, where their base part y is known."""
        return [path.up(base, up, y) for path, up in zip(self.shared, ups, strict=True)]

    def widths(self, width: int) -> list[int]:
        """Widths of all that the module reads; every base stream is equally wide."""
        # a token at a time, working them out costs as much as a small product
        if width not in self.known_widths:
            up_in = [path.up_in for path in (*self.shared, *self.apart)]
            base = (width - sum(up_in)) // (1 + len(self.apart))
            own = [own for path in self.apart for own in (base, path.up_in)]
            self.known_widths[width] = [base, *up_in[: len(self.shared)], *own]
        return self.known_widths[width]

    def split(self, x: Tensor) -> Sequence[Tensor]:
        """Take streams apart, each as it lies in memory in the model of its own."""
        axis = -1 if self.head_axis is None else self.head_axis
        widths = self.widths(x.shape[axis])
        if self.head_axis is None and (known := streams_of(x, widths)):
            return known
        if widths[0] == x.shape[axis]:
            return [self.whole(x), *(x[..., :0] for _ in widths[1:])]
        parts = x.split_with_sizes(widths, dim=axis)
        if self.head_axis is not None:
            return [part.clone() for part in parts]
        # a chunk of a fused projection is strided in the base model too, and an activation keeps its strides
        return parts if self.keeps_strides and not x.is_contiguous() else [own_memory(part) for part in parts]

    def whole(self, x: Tensor) -> Tensor:
        """What the module reads where all of that is the base's."""
        return x if self.keeps_strides else own_memory(x)

    def join(self, found: list[list[Tensor | None]]) -> Tensor:
        """Put the results of all paths side by side."""
        streams = [own for path in found for own in path if own is not None and own.numel()]
        if self.stacked_width is not None and len(found) > 1:
            joined = [torch.cat([own for own in path if own is not None], dim=-1) for path in found]
            return torch.cat([functional.pad(path, (0, self.stacked_width - path.shape[-1])) for path in joined])
        if self.head_axis is not None:
            return torch.cat([own.movedim(self.head_axis, -2) for own in streams], dim=-2).movedim(-2, self.head_axis)
        return self.join_sections(found) if self.base_sections else join_streams(*streams)

    def join_sections(self, found: list[list[Tensor | None]]) -> Tensor:
        """A fused projection is joined section by section: q, q_up of A, ..., k, k_up of A, ..."""
        bases = [path[0] for path in found]
        columns = [bases[0].split(self.base_sections, dim=-1)]
        ups, apart = iter(found[0][1:]), iter(found[1:])
        for path in (*self.shared, *self.apart):
            base, up = next(apart) if path.is_apart else (None, next(ups))
            columns += [] if base is None else [base.split(self.base_sections, dim=-1)]
            columns += [] if up is None else [up.split(path.up_sections, dim=-1)]
        return torch.cat([part for parts in zip(*columns, strict=True) for part in parts], dim=-1)


def join_rows(base: Tensor, rows: Sequence[Tensor]) -> Tensor:
    """Join the base stream of a single token (1, 1, d) and other streams, a row (n,) each, and remember them."""
    joined: Any = torch.cat((base.view(-1), *rows)).view(*base.shape[:-1], -1)
    if not joined.is_inference():
        joined.rows = ((base, *rows), joined._version)
    return joined


def rows_of(x: Tensor, widths: list[int]) -> Sequence[Tensor]:
    """The base stream of a single token, and its other streams as rows, each in memory as if it had its own."""
    rows, version = getattr(x, "rows", ((), None))
    if rows and version == x._version and [row.shape[-1] for row in rows] == widths:
        return rows
    base, *rows = map(own_memory, x.view(-1).split_with_sizes(widths))
    return base.view(*x.shape[:-1], -1), *rows


class RowModule(ComposedModule):
    """A module through which all up streams of a single token pass as rows: that has least around each of them."""

    def forward_paths(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.apart or not is_row(x, x):
            return super().forward_paths(run, x)
        base, *rows = rows_of(x, self.widths(x.shape[-1]))
        y = run(base)
        return join_rows(y, self.up_rows(run, base.view(-1), rows))

    def up_rows(self, run: Callable[[Tensor], Tensor], base: Tensor, rows: list[Tensor]) -> list[Tensor]:
        """What `ups` are, as rows; without those that are None."""
        raise NotImplementedError


class ComposedLinear(RowModule):
    """A linear, all of whose up parts are those of expanded linears in its dtype.

    Attributes:
        blocks: Where each has W21, W22 and bias. Between one token and the next all weights pass through the
            processor's cache, so that to look for them in each module costs as much as a small product.
    """

    blocks: tuple[dict[str, Tensor | None], ...] = ()

    def look_up(self) -> None:
        self.blocks = tuple(path.module._parameters for path in self.shared)

    def up_rows(self, run: Callable[[Tensor], Tensor], base: Tensor, rows: list[Tensor]) -> list[Tensor]:
        pairs = [(row, own) for row, own in zip(rows, self.blocks, strict=True) if own["w21"] is not None]
        return [row_up(base, row, own["w21"], own["w22"], own["up_bias"]) for row, own in pairs]


class ComposedActivation(RowModule):
    """An activation, which is the stock one of each."""

    def up_rows(self, run: Callable[[Tensor], Tensor], base: Tensor, rows: list[Tensor]) -> list[Tensor]:
        return [run(row) for row in rows]


def are_all(kind: type, paths: tuple[PathThrough, ...]) -> bool:
    """Whether the up parts of all that share the base stream are those of expanded modules of a kind."""
    own = [type(path.module) for path in paths if not path.is_apart]
    return bool(own) and all(issubclass(each, kind) and each.forward_up is kind.forward_up for each in own)


def are_linears(stock: nn.Module, paths: tuple[PathThrough, ...]) -> bool:
    """Whether all up parts are those of expanded linears, in the dtype of the stock module."""
    blocks = [path.module.w21 for path in paths if not path.is_apart] if are_all(ExpandedLinear, paths) else [None]
    return any(own is not None for own in blocks) and {own.dtype for own in blocks if own is not None} == {
        stock.weight.dtype
    }


class ComposedNorm(ComposedModule):
    """A norm that takes the up streams of a single token together, where all are equally wide and normalised alike.

    That is exact: each row is normalised by itself. What reads it later expects that it begins at a cache line.
    """

    gains: tuple[dict[str, Tensor], ...] = ()

    def look_up(self) -> None:
        self.gains = tuple(path.module._parameters for path in self.shared)

    def forward_paths(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        width, count = self.shared[0].up_in, len(self.shared)
        is_token = count > 1 and x.numel() == x.shape[-1] and x.device.type == "cpu"
        if not is_token or width * x.element_size() % CACHE_LINE:
            return super().forward_paths(run, x)
        widths = self.widths(x.shape[-1])
        parts = x.split_with_sizes([widths[0], count * width, *widths[1 + count :]], dim=-1)
        base, ups, *apart = map(own_memory, parts)
        y = run(base)
        rows = self.normalised(ups.view(count, width)).to(y.dtype)
        if not self.apart and is_row(x, y):
            return join_rows(y, rows.unbind())
        ups = rows.view(count, *x.shape[:-1], width)
        return self.join([[y, *ups.unbind()], *self.streams_apart(run, apart)])

    def normalised(self, rows: Tensor) -> Tensor:
        """Up streams that share the base stream, a row each, in float32."""
        norm, gains = self.shared[0].module, torch.stack([own["up_weight"] for own in self.gains]).float()
        rows = functional.rms_norm(rows.float(), rows.shape[-1:], eps=norm.up_epsilon)
        return rows * (gains + 1.0 if norm.up_style.endswith("_plus_one") else gains)


def are_alike(paths: tuple[PathThrough, ...]) -> bool:
    """Whether the up streams of all that share the base stream are normalised alike, but for their gains."""
    norms = [path.module for path in paths if not path.is_apart]
    if not all(isinstance(norm, ExpandedNorm) and norm.up_style.startswith("rms") for norm in norms):
        return False
    return len({(norm.up_style, norm.up_epsilon, norm.up_weight.shape) for norm in norms}) == 1


class ComposedBlock(ComposedModule):
    """A whole block of a layer, run as it is on each base stream; see `ExpandedBlock`."""

    def forward(self, *args, **kwargs):
        stock, found = super(ComposedModule, self).forward, []

        def run(base: Tensor) -> Tensor:
            found.append(stock(base, *args[1:], **kwargs) if args else stock(**(kwargs | {"hidden_states": base})))
            y = found[-1][0] if isinstance(found[-1], tuple) else found[-1]
            return y.view(*base.shape[:-1], -1)

        y = self.forward_paths(run, args[0] if args else kwargs["hidden_states"])
        # what else it gives, such as the scores of a mixture's router, is the base's
        return (y, *found[0][1:]) if isinstance(found[0], tuple) else y


class ComposedPadding(ComposedModule):
    """A module that reads no hidden state, such as a position embedding; zeros stand beside what it gives."""

    def forward(self, *args, **kwargs):
        y = super(ComposedModule, self).forward(*args, **kwargs)
        return functional.pad(y, (0, sum(getattr(path.module, "up_out", 0) for path in (*self.shared, *self.apart))))


def compose_module(module: nn.Module, paths: tuple[PathThrough, ...], specs: list[dict[str, Any]]) -> None:
    """Let paths pass through a stock module, in place.

    Args:
        module: The stock module.
        paths: The paths.
        specs: All that is said of it, at least one.
    """
    norm = ComposedNorm if are_alike(paths) else ComposedModule
    linear = ComposedLinear if are_linears(module, paths) else ComposedModule
    activation = ComposedActivation if are_all(ExpandedActivation, paths) else ComposedModule
    own = {"norm": norm, "linear": linear, "activation": activation}
    kinds = {"block": ComposedBlock, "padding": ComposedPadding} | own
    fused = [[base for base, _ in spec["out_features"]] for spec in specs if "out_features" in spec]
    sections = next((own for own in [*fused, *(spec.get("sections", ()) for spec in specs)] if len(own) > 1), ())
    kind = ComposedModule if sections else kinds.get(specs[0]["kind"], ComposedModule)
    module.__class__ = expanded_class(kind, type(module))
    module.shared = tuple(path for path in paths if not path.is_apart)
    module.apart = tuple(path for path in paths if path.is_apart)
    module.known_widths, module.base_sections = {}, tuple(sections)
    module.keeps_strides = any(spec["kind"] in ("activation", "head_norm") for spec in specs)
    module.head_axis = next((spec["axis"] for spec in specs if spec["kind"] == "head_norm"), None)
    module.look_up()
