"""Several expansions of one base side by side: what is the base's is computed once, beside it each has its up stream.

    [x | x_up of A | x_up of B | ... | x' of C, x_up of C | ...]

An expansion shares the base stream as long as nothing of it writes there: a `preserve` expansion always, any other
below its first layer with W12, its fork. From there on it has a base stream of its own, x', apart. Each expansion's
own modules compute what is its own; a stock module runs once for all that share the base stream, and once more for
each that stands apart. Heads lie as features do, so that one stock cache holds the base's heads once.
This file needs only torch and transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .expanded_attention import Part, expand_attention, switch_attention
from .expanded_model import change_hidden, find_base_model, find_module, new_heads, specs_of
from .expanded_modules import ExpandedBlock, ExpandedModule, ExpandedPadding, expanded_class
from .expanded_streams import join_streams, own_memory, streams_of

MODE = "composed"


class Path(NamedTuple):
    """An expansion as it passes through a stock module.

    Attributes:
        module: The module of that name of the expanded model, on the same weights; a stock one where it is not expanded.
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
        paths: Those that share the base stream, then those that stand apart.
        base_sections: Widths of the parts of a fused projection; empty where it is none.
        head_axis: Axis of the heads of a norm inside heads, None for any other module.
        keeps_strides: Whether its result lies in memory as its input does.
        stacked_width: Width to which paths are padded, to leave the last norm one after the other along the batch;
            None for any other module.
    """

    paths: tuple[Path, ...] = ()
    base_sections: tuple[int, ...] = ()
    head_axis: int | None = None
    keeps_strides = False
    stacked_width: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_paths(super().forward, x)

    def forward_paths(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Every path by itself: no operation sees more of a base stream than in the base model."""
        parts = iter(self.split(x))
        base = next(parts)
        y = run(base)
        found: list[list[Tensor | None]] = [[y]]
        for path in self.paths:
            if path.is_apart:
                found.append(list(path.streams(run, next(parts), next(parts))))
            else:
                found[0].append(path.up(base, next(parts), y))
        return self.join(found)

    def widths(self, width: int) -> list[int]:
        """Widths of all that the module reads; every base stream is equally wide."""
        apart = sum(path.is_apart for path in self.paths)
        base = (width - sum(path.up_in for path in self.paths)) // (1 + apart)
        return [base, *(own for path in self.paths for own in [base] * path.is_apart + [path.up_in])]

    def split(self, x: Tensor) -> Sequence[Tensor]:
        """Take streams apart, each as it lies in memory in the model of its own."""
        axis = -1 if self.head_axis is None else self.head_axis
        if len(self.paths) + 1 == len(widths := self.widths(x.shape[axis])) and not any(widths[1:]):
            return [self.whole(x), *(x[..., :0] for _ in self.paths)]
        parts = x.split(widths, dim=axis)
        if self.head_axis is not None:
            return [part.clone() for part in parts]
        # a chunk of a fused projection is strided in the base model too, and an activation keeps its strides
        if self.keeps_strides and not x.is_contiguous():
            return parts
        return streams_of(x, widths) or [own_memory(part) for part in parts]

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
        for path in self.paths:
            base, up = next(apart) if path.is_apart else (None, next(ups))
            columns += [] if base is None else [base.split(self.base_sections, dim=-1)]
            columns += [] if up is None else [up.split(path.up_sections, dim=-1)]
        return torch.cat([part for parts in zip(*columns, strict=True) for part in parts], dim=-1)


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
        return functional.pad(y, (0, sum(getattr(path.module, "up_out", 0) for path in self.paths)))


class Stage(NamedTuple):
    """Names of the expansions that share the base stream, and of those that stand apart, in this order."""

    shared: tuple[str, ...]
    apart: tuple[str, ...]

    def streams(self) -> list[tuple[str, bool]]:
        """The streams side by side: each an expansion, or "" for the base, and whether it is an up stream."""
        return [("", False), *((name, True) for name in self.shared)] + [
            (name, is_up) for name in self.apart for is_up in (False, True)
        ]


class Rearranged(NamedTuple):
    """How the hidden state changes before a layer: up streams enter as zeros, base streams part.

    Attributes:
        before: Streams that arrive, each with its width.
        after: Streams that the layer reads.
    """

    before: dict[tuple[str, bool], int]
    after: dict[tuple[str, bool], int]

    def __call__(self, hidden: Tensor) -> Tensor:
        found = dict(zip(self.before, hidden.split(list(self.before.values()), dim=-1), strict=True))
        base = found["", False]
        for (name, is_up), width in self.after.items():
            if not is_up:
                found.setdefault((name, False), base)
            elif found.get((name, True), base[..., :0]).shape[-1] != width:
                found[name, True] = base.new_zeros(*base.shape[:-1], width)
        return torch.cat([found[stream] for stream in self.after], dim=-1)


def rearrange(layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Let streams enter and part before a layer; a hook, so that no stock forward is touched."""
    return None if layer.rearranged is None else change_hidden(args, kwargs, layer.rearranged)


def fork_of(plan: dict[str, Any]) -> int | None:
    """The first layer in which an expansion writes into the base stream, or None."""
    return min(plan["collaborative"]["layers"], default=None)


def up_in(plan: dict[str, Any], spec: dict[str, Any], attention: dict[str, dict]) -> int:
    """Features of its up stream, or heads, that a module of an expansion reads.

    Args:
        plan: `config.scale_surgery` of the expanded model.
        spec: What that says of the module; empty where it is not expanded.
        attention: What it says of the attention of the layer.
    """
    kind, widths = spec.get("kind"), plan["widths"]
    if kind in ("linear", "grown"):
        return spec["in_features"][1]
    if kind == "head_norm":
        heads = next(own for own in attention.values())
        new = new_heads(plan, heads)
        return new.heads if spec["heads"] == heads["heads"] else new.kv_heads
    if kind == "passing" and spec["base"] is None:
        return 0
    own = {"norm": spec.get("up"), "activation": widths["up_inner_width"]}
    return own.get(kind, widths["up_width"] if kind in ("passing", "block") else 0)


class Place(NamedTuple):
    """Where composed modules are made: in the base model, or in one of its layers.

    Attributes:
        stock: The part of the composed model.
        own: The same part of each expanded model, by name of the expansion.
        specs: What each says of its modules there.
        attention: What each says of its attention there.
        stage: The streams that pass through.
    """

    stock: nn.Module
    own: dict[str, nn.Module]
    specs: dict[str, dict[str, dict]]
    attention: dict[str, dict[str, dict]]
    stage: Stage

    def compose(self, plans: dict[str, dict], paths: dict[str, dict]) -> None:
        """Let all paths pass through the modules of this place.

        Args:
            plans: `config.scale_surgery` of each expansion.
            paths: What base streams apart have to pass through, by name; it is nothing else where there is none.
        """
        names = dict.fromkeys(name for specs in self.specs.values() for name in specs)
        for name in dict.fromkeys([*names, *(paths if self.stage.apart else ())]):
            specs = {own: self.specs[own].get(name, {}) for own in (*self.stage.shared, *self.stage.apart)}
            known = [spec for spec in specs.values() if spec] + [own for own in [paths.get(name)] if own]
            members = tuple(
                Path(
                    find_module(self.own[own], name),
                    up_in(plans[own], spec, self.attention[own]),
                    own in self.stage.apart,
                )
                for own, spec in specs.items()
            )
            compose_module(find_module(self.stock, name), members, known)


def compose_module(module: nn.Module, paths: tuple[Path, ...], specs: list[dict[str, Any]]) -> None:
    """Let paths pass through a stock module, in place.

    Args:
        module: The stock module.
        paths: The paths.
        specs: All that is said of it, at least one.
    """
    kind = {"block": ComposedBlock, "padding": ComposedPadding}.get(specs[0]["kind"], ComposedModule)
    fused = [[base for base, _ in spec["out_features"]] for spec in specs if "out_features" in spec]
    sections = next((own for own in [*fused, *(spec.get("sections", ()) for spec in specs)] if len(own) > 1), ())
    module.__class__ = expanded_class(kind, type(module))
    module.paths, module.base_sections = paths, tuple(sections)
    module.keeps_strides = any(spec["kind"] in ("activation", "head_norm") for spec in specs)
    module.head_axis = next((spec["axis"] for spec in specs if spec["kind"] == "head_norm"), None)


def restore(model: nn.Module) -> None:
    """Make stock modules of all that paths pass through."""
    for module in list(model.modules()):
        if isinstance(module, ComposedModule):
            module.__class__ = type(module).__bases__[1]
            for name in ("paths", "base_sections", "head_axis", "keeps_strides", "stacked_width"):
                vars(module).pop(name, None)
        if MODE in getattr(module, "modes", ()):
            switch_attention(module, "stock")
        if hasattr(module, "rearranged"):
            module.rearranged = None


def compose_attention(module: nn.Module, facts: dict[str, Any], parts: list[Part]) -> None:
    """Tell an attention module of the heads of all paths.

    Args:
        module: The attention module.
        facts: `heads`, `kv_heads`, and what its stock forward reads where it has so many.
        parts: Heads that attend by themselves, in the order in which they lie.
    """
    if len(parts) == 1:
        return
    heads = sum(part.heads for part in parts)
    own = {key: {name: each * heads // facts["heads"] for name, each in facts[key].items()} for key in ATTENTION_VALUES}
    expand_attention(module, MODE, parts, **own)
    switch_attention(module, MODE)


ATTENTION_VALUES = ("attributes", "config")


def parts_of(stage: Stage, old: Part, new: dict[str, Part]) -> list[Part]:
    """Heads of all paths in the order in which they lie."""
    apart = [part for name in stage.apart for part in ([old, new[name]] if name in new else [old])]
    return [old, *(new[name] for name in stage.shared if name in new), *apart]


def stages(plans: dict[str, dict], layers: int) -> Iterator[Stage]:
    """Who shares the base stream in each layer, and after the last one."""
    for layer in (*range(layers), layers - 1):
        apart = [name for name, plan in plans.items() if (own := fork_of(plan)) is not None and own <= layer]
        yield Stage(tuple(name for name in plans if name not in apart), tuple(apart))


def compose_layers(model: nn.Module, members: dict[str, nn.Module], facts: dict[str, Any]) -> Stage:
    """Let several expansions pass through a stock model side by side, until it is restored.

    Args:
        model: The stock model.
        members: Expanded models on its weights, by name.
        facts: What `build_paths` says of the base.

    Returns:
        Who leaves the last norm.
    """
    plans = {name: own.config.scale_surgery for name, own in members.items()}
    base_model = find_base_model(model, facts["base_model"])
    inner = {name: find_base_model(own, facts["base_model"]) for name, own in members.items()}
    layers = base_model.get_submodule(facts["layers"])
    *inside, last = stages(plans, len(layers))
    first = Stage(tuple(plans), ())
    norm = {facts["last"]: {"kind": "passing", "base": None, "up": 0}}
    for stage, paths in ((first, {}), (last, norm)):
        specs = {name: {key: own for key, own in plan["model"].items() if (key in norm) == bool(paths)} for name, plan in plans.items()}
        Place(base_model, inner, specs, dict.fromkeys(plans, {}), stage).compose(plans, paths)
    before = widths_of(first, plans, facts["hidden"], is_entered=False)
    for index, (layer, stage) in enumerate(zip(layers, inside, strict=True)):
        after = widths_of(stage, plans, facts["hidden"], is_entered=True)
        layer.rearranged, before = None if after == before else Rearranged(before, after), after
        own = {name: each.get_submodule(facts["layers"])[index] for name, each in inner.items()}
        compose_layer(layer, index, own, plans, stage, facts["kinds"][facts["kind_of_layer"][index]])
    base_model.get_submodule(facts["last"]).stacked_width = sum(widths_of(first, plans, facts["hidden"], is_entered=True).values())
    return last


def widths_of(stage: Stage, plans: dict[str, dict], hidden: int, *, is_entered: bool) -> dict[tuple[str, bool], int]:
    """The streams of a stage, each with its width; before the first layer some up streams have not entered."""
    up = {name: plan["widths"]["up_width"] * (is_entered or plan.get("enter") != "hook") for name, plan in plans.items()}
    return {(name, is_up): up[name] if is_up else hidden for name, is_up in stage.streams()}


def compose_layer(
    layer: nn.Module, index: int, own: dict[str, nn.Module], plans: dict[str, dict], stage: Stage, facts: dict[str, Any]
) -> None:
    """Let paths pass through one layer.

    Args:
        layer: The stock layer.
        index: Its number.
        own: The same layer of each expanded model.
        plans: `config.scale_surgery` of each expansion.
        stage: The streams that pass through.
        facts: What is said of layers of its kind.
    """
    specs, attention = {}, {}
    for name, plan in plans.items():
        is_expanded, said = index in plan["expanded_layers"], specs_of(plan, plan, index)
        specs[name], attention[name] = (said["expanded"], said["attention"]) if is_expanded else (said["passing"], {})
    Place(layer, own, specs, attention, stage).compose(plans, facts["modules"])
    for name, heads in facts["attention"].items():
        new = {one: new_heads(plans[one], each[name]) for one, each in attention.items() if name in each}
        old = Part(heads["heads"], heads["kv_heads"], is_old=True)
        compose_attention(layer.get_submodule(name), heads, parts_of(stage, old, new))
