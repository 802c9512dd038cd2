"""The parts of a layer of a twin and the norms around them; together they add up to what the layer gives."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from scale_surgery.deriving.attention import describe_attention
from scale_surgery.deriving.mlp import describe_mlp, without_gate
from scale_surgery.deriving.norms import is_norm, norm_style
from scale_surgery.deriving.part import LayerPart, SplitError, features, is_linear
from scale_surgery.deriving.watch import ModuleCall, Trace, is_combination, is_same
from scale_surgery.errors import Problem, UnsupportedFamilyError
from scale_surgery.planning.architecture import Block, Kind, Linear, Norm

# a smaller number is a rounding error
LEAST = 1e-3


@dataclass
class _Contents:
    """Facts that calls of a layer have shown so far."""

    parts: list[LayerPart] = field(default_factory=list)
    pre_norms: list[Norm] = field(default_factory=list)
    post_norms: list[Norm] = field(default_factory=list)
    # what is added to the residual stream, by parts or by the norms after them, and the names of these parts
    added: list[Tensor] = field(default_factory=list)
    added_by: list[tuple[str, ...]] = field(default_factory=list)
    # the last norm that reads the output of a part, by its name
    norm_after: dict[str, str] = field(default_factory=dict)
    norm_outputs: dict[str, Tensor] = field(default_factory=dict)
    loose: list[ModuleCall] = field(default_factory=list)
    # names of parts that add the residual stream themselves
    adding: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class TwinLayer:
    """A layer of a twin: its kind, with the twin's numbers, its parts, and those that add the stream themselves."""

    kind: Kind
    parts: tuple[LayerPart, ...]
    adding: frozenset[str]


def derive_layer(trace: Trace, path: str, layer: nn.Module, called: str) -> TwinLayer:
    """Derive the blocks and norms of a layer; `called` is its path in the real model, for errors."""
    call = trace.of(path)
    if call is None or call.before is None or call.after is None:
        raise UnsupportedFamilyError(Problem("layer-off-stream", called))
    contents = _look_through(trace, path, layer, call.before, called)
    title = f"{called} ({type(call.module).__name__})"
    if (problem := _why_no_sum(call, contents, trace.inside(path), title)) is not None:
        raise UnsupportedFamilyError(problem)
    blocks = tuple(
        replace(
            without_gate(derive_block(part, adds_itself=part.name in contents.adding)),
            norm=_norm_before(part, contents),
            post_norm=contents.norm_after.get(part.name, ""),
        )
        for part in contents.parts
    )
    kind = Kind(blocks, tuple(contents.pre_norms), tuple(contents.post_norms), _direct(contents))
    return TwinLayer(kind, tuple(contents.parts), frozenset(contents.adding))


def _look_through(trace: Trace, path: str, layer: nn.Module, stream: Tensor, called: str) -> _Contents:
    contents, inside, hidden = _Contents(), trace.inside(path), stream.shape[-1]
    for call in _outermost(inside):
        if call.before is None or call.after is None or isinstance(call.module, (nn.Dropout, nn.Identity)):
            continue
        if is_norm(call.module) and call.before.shape[-1] == hidden:
            _add_norm(contents, call)
        elif is_linear(call.module) or call.before.shape[-1] != hidden or not list(call.module.parameters()):
            contents.loose.append(call)
            if is_linear(call.module) and features(call.module)[1] == hidden:
                _close_loose(contents, layer, stream)
        else:
            _add_part(contents, _part_of(trace, path, call, inside), stream)
    if rest := [call.name for call in contents.loose if is_linear(call.module)]:
        raise UnsupportedFamilyError(Problem("linears-off-stream", called, linears=rest))
    return contents


def _direct(contents: _Contents) -> tuple[str, ...]:
    """Linears that read the residual stream itself, in a layer where others read the output of a norm."""
    if not contents.pre_norms:
        return ()
    return tuple(reader.name for part in contents.parts for reader in part.readers if not _norm_before(part, contents))


def _norm_before(part: LayerPart, contents: _Contents) -> str:
    """The norm whose output a part reads; empty where it reads the residual stream itself."""
    same = {name: output for name, output in contents.norm_outputs.items() if output.numel() == part.entry.numel()}
    return next((name for name, output in same.items() if is_combination(part.entry, [output]) is not None), "")


def _outermost(calls: list[ModuleCall]) -> Iterator[ModuleCall]:
    """Calls of modules that lie in no other module that was called."""
    names = {call.name for call in calls} - {call.name for call in calls if _is_container(call, calls)}
    for call in (call for call in calls if call.name in names):
        parents = itertools.accumulate(call.name.split(".")[:-1], lambda parent, child: f"{parent}.{child}")
        if not names & set(parents):
            yield call


def _is_container(call: ModuleCall, calls: list[ModuleCall]) -> bool:
    """A module whose first norm reads what the module reads contains a norm and a block, and is no block itself."""
    inside = [inner_call for inner_call in calls if inner_call.name.rpartition(".")[0] == call.name]
    return any(is_norm(inner_call.module) and is_same(inner_call.before, call.before) for inner_call in inside)


def _part_of(trace: Trace, path: str, call: ModuleCall, inside: list[ModuleCall]) -> LayerPart:
    inner_calls = tuple(inner_call for inner_call in inside if inner_call.name.startswith(f"{call.name}."))
    modules = {call.module, *(inner_call.module for inner_call in inner_calls)}
    attentions = tuple(attention for attention in trace.attentions if attention.module in modules)
    assert call.before is not None
    return LayerPart(call.name, call.module, call, inner_calls, call.before, attentions)


def _close_loose(contents: _Contents, layer: nn.Module, stream: Tensor) -> None:
    """Make a part of linears in the layer itself, once one of them writes to the residual stream."""
    calls, contents.loose = contents.loose, []
    entry = next(call for call in calls if is_linear(call.module)).before
    assert entry is not None
    _add_part(contents, LayerPart("", layer, None, tuple(calls), entry, ()), stream)


def _add_part(contents: _Contents, part: LayerPart, stream: Tensor) -> None:
    """Add a part: it contributes its output, or that of its writer where it adds the residual stream itself."""
    written = None if part.writer is None else part.writer.after
    gave = written if part.call is None else part.call.after
    if gave is None:
        raise UnsupportedFamilyError(
            Problem("linear-between-streams", type(part.module).__name__, linear=part.inside[-1].name)
        )
    if (
        written is not None
        and written.numel() == gave.numel() == stream.numel()
        and is_combination(gave, [written]) is None
    ):
        before = [tensor for tensor in contents.added if tensor.numel() == stream.numel()]
        if is_combination(gave, [written, stream, *before]) is not None:
            contents.adding.add(part.name)
            gave = written
    contents.parts.append(part)
    contents.added.append(gave)
    contents.added_by.append((part.name,))


def _add_norm(contents: _Contents, call: ModuleCall) -> None:
    """Add a norm: a post norm where it reads outputs of parts, a pre norm where it reads the residual stream."""
    assert call.before is not None and call.after is not None
    style = norm_style(call.module, call.before.shape[-1])
    if style is None:
        raise UnsupportedFamilyError(Problem("norm-unknown", f"{call.name} ({type(call.module).__name__})"))
    contents.norm_outputs[call.name] = call.after
    for count in range(1, len(contents.added) + 1):
        last = [tensor for tensor in contents.added[-count:] if tensor.numel() == call.before.numel()]
        same = [tensor.reshape(call.before.shape) for tensor in last]
        if same and is_combination(call.before, same) is not None:
            contents.post_norms.append(Norm(call.name, style))
            names = tuple(itertools.chain.from_iterable(contents.added_by[-count:]))
            contents.norm_after |= dict.fromkeys(names, call.name)
            contents.added[-count:], contents.added_by[-count:] = [call.after], [names]
            return
    contents.pre_norms.append(Norm(call.name, style))


def _why_no_sum(call: ModuleCall, contents: _Contents, inside: list[ModuleCall], title: str) -> Problem | None:
    assert call.before is not None and call.after is not None
    added = [tensor for tensor in contents.added if tensor.numel() == call.after.numel()]
    is_one_stream = call.before.numel() == call.after.numel() and len(added) == len(contents.added)
    numbers = is_combination(call.after, [call.before, *added]) if is_one_stream else None
    if numbers is None:
        return _who_changes_the_stream(call, contents, inside, added, title, is_one_stream=is_one_stream)
    unused = [part.name for part, number in zip(contents.parts, numbers[1:], strict=False) if abs(number) < LEAST]
    if unused:
        return Problem("block-not-added", title, blocks=unused)
    return None if abs(numbers[0] - 1) < LEAST else Problem("stream-multiplied", title, factor=numbers[0])


def _who_changes_the_stream(
    call: ModuleCall,
    contents: _Contents,
    inside: list[ModuleCall],
    added: list[Tensor],
    title: str,
    *,
    is_one_stream: bool,
) -> Problem:
    assert call.after is not None
    parameters = [name for name, value in call.module.named_parameters(recurse=False) if value.numel() > 1]
    for inner_call in inside:
        if is_norm(inner_call.module) and is_same(inner_call.after, call.after):
            return Problem("output-of-norm", title, norm=inner_call.name)
    for name, output in contents.norm_outputs.items():
        if output.numel() == call.after.numel() and is_combination(call.after, [output, *added]) is not None:
            return Problem("residual-of-norm", title, norm=name)
    if not is_one_stream:
        return Problem("streams-several", title)
    if parameters:
        return Problem("stream-scaled", title, parameters=parameters)
    return Problem("output-no-sum", title)


def derive_block(part: LayerPart, *, adds_itself: bool = False) -> Block:
    """Derive how a part of a layer is expanded."""
    group = "attn" if part.attentions or part.mixes_tokens() else "ffn"
    block = Block(part.name, type(part.module).__name__, group, "block")  # type: ignore[arg-type]
    if (reason := _why_block(part, adds_itself)) is None:
        return _split(part, replace(block, treatment="edges", linears=_edges(part)))
    if adds_itself or not part.name:
        where = part.name or type(part.module).__name__
        raise UnsupportedFamilyError(Problem("block-adds-stream", where, reason=reason))
    return replace(block, reason=reason)


def _why_block(part: LayerPart, adds_itself: bool) -> str | None:
    """Why no linear of a part can be expanded; None where they can."""
    names = [call.name for call in part.linears]
    if any(re.search("expert", name) for name, _ in part.module.named_modules()) and part.name:
        return "a mixture of experts"
    if not part.readers or part.writer is None:
        return "no linear of its own reads the residual stream and another writes it"
    if len(set(names)) != len(names):
        return "one of its linears runs more than once"
    if not adds_itself and not part.writer_is_output():
        return f"what it gives is more than what {part.writer.name} gives"
    if not part.only_readers_read():
        return "not only linears read the residual stream"
    return None


def _edges(part: LayerPart) -> tuple[Linear, ...]:
    writer = part.writer
    assert writer is not None
    reading = tuple(Linear(reader.name, ("read",), *_shape(reader)) for reader in part.readers)
    return (*reading, Linear(writer.name, ("write",), *_shape(writer)))


def _shape(call: ModuleCall) -> tuple[int, tuple[int, ...]]:
    inputs, outputs = features(call.module)
    return inputs, (outputs,)


def _split(part: LayerPart, block: Block) -> Block:
    try:
        with torch.random.fork_rng(devices=[]):
            return describe_attention(part, block) if block.group == "attn" else describe_mlp(part, block)
    except SplitError as reason:
        return replace(block, reason=str(reason))
