"""What a layer of a twin is made of: its parts, the norms around them, and that they add up to what it gives."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from scale_surgery.deriving.attention import RefusedError, split_attention
from scale_surgery.deriving.mlp import plain, split_mlp
from scale_surgery.deriving.norms import is_norm, norm_style
from scale_surgery.deriving.part import Part, features, is_linear
from scale_surgery.deriving.watch import Call, Trace, is_combination, is_same
from scale_surgery.errors import UnsupportedFamilyError
from scale_surgery.planning.architecture import Block, Kind, Linear, Norm

SUPPORTED = "Supported are layers that add what their blocks give to what they read"
# a smaller number is a rounding error
LEAST = 1e-3


@dataclass
class _Found:
    """What was found so far while going through the calls of a layer."""

    parts: list[Part] = field(default_factory=list)
    pre_norms: list[Norm] = field(default_factory=list)
    post_norms: list[Norm] = field(default_factory=list)
    # what is added to the residual stream, by parts or by the norms after them
    added: list[Tensor] = field(default_factory=list)
    norm_outputs: dict[str, Tensor] = field(default_factory=dict)
    loose: list[Call] = field(default_factory=list)
    # names of parts that add the residual stream themselves
    adding: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Layer:
    """A layer of a twin: its kind, with the twin's numbers, its parts, and those that add the stream themselves."""

    kind: Kind
    parts: tuple[Part, ...]
    adding: frozenset[str]


def derive_layer(trace: Trace, path: str, layer: nn.Module, called: str) -> Layer:
    """Derive what a layer is made of.

    Args:
        trace: One forward of a twin.
        path: Path of the layer.
        layer: The layer.
        called: What errors call it, the path of the layer of the real model that it stands for.

    Returns:
        Its kind and its parts.

    Raises:
        UnsupportedFamilyError: If it does not add what its blocks give to what it reads.
    """
    call = trace.of(path)
    if call is None or call.before is None or call.after is None:
        raise UnsupportedFamilyError(f"{called}: this layer is not run on the residual stream. {SUPPORTED}.")
    found = _look_through(trace, path, layer, call.before, called)
    _check_sum(called, call, found, trace.inside(path))
    blocks = tuple(
        replace(plain(derive_block(part, adds_itself=part.name in found.adding)), norm=_norm_before(part, found))
        for part in found.parts
    )
    kind = Kind(blocks, tuple(found.pre_norms), tuple(found.post_norms), _direct(found))
    return Layer(kind, tuple(found.parts), frozenset(found.adding))


def _look_through(trace: Trace, path: str, layer: nn.Module, stream: Tensor, called: str) -> _Found:
    found, inside, hidden = _Found(), trace.inside(path), stream.shape[-1]
    for call in _outermost(inside):
        if call.before is None or call.after is None or isinstance(call.module, (nn.Dropout, nn.Identity)):
            continue
        if is_norm(call.module) and call.before.shape[-1] == hidden:
            _add_norm(found, call)
        elif is_linear(call.module) or call.before.shape[-1] != hidden or not list(call.module.parameters()):
            found.loose.append(call)
            if is_linear(call.module) and features(call.module)[1] == hidden:
                _close_loose(found, layer, stream)
        else:
            _add_part(found, _part_of(trace, path, call, inside), stream)
    if rest := [own.name for own in found.loose if is_linear(own.module)]:
        raise UnsupportedFamilyError(f"{called}: {', '.join(rest)} writes nothing to the residual stream. {SUPPORTED}.")
    return found


def _direct(found: _Found) -> tuple[str, ...]:
    """Linears that read the residual stream as it is, in a layer in which others read what a norm gives."""
    if not found.pre_norms:
        return ()
    return tuple(own.name for part in found.parts for own in part.readers if not _norm_before(part, found))


def _norm_before(part: Part, found: _Found) -> str:
    """The norm whose output a part reads; empty where it reads the residual stream as it is."""
    same = {name: own for name, own in found.norm_outputs.items() if own.numel() == part.entry.numel()}
    return next((name for name, own in same.items() if is_combination(part.entry, [own]) is not None), "")


def _outermost(calls: list[Call]) -> Iterator[Call]:
    """Calls of modules that lie in no other module that was called."""
    names = {own.name for own in calls} - {own.name for own in calls if _is_container(own, calls)}
    for call in (own for own in calls if own.name in names):
        parents = itertools.accumulate(call.name.split(".")[:-1], lambda one, other: f"{one}.{other}")
        if not names & set(parents):
            yield call


def _is_container(call: Call, calls: list[Call]) -> bool:
    """A module that begins with a norm of what it reads holds a norm and a block, and is no block itself."""
    inside = [own for own in calls if own.name.rpartition(".")[0] == call.name]
    return any(is_norm(own.module) and is_same(own.before, call.before) for own in inside)


def _part_of(trace: Trace, path: str, call: Call, inside: list[Call]) -> Part:
    own = tuple(other for other in inside if other.name.startswith(f"{call.name}."))
    modules = {call.module, *(other.module for other in own)}
    attentions = tuple(attention for attention in trace.attentions if attention.module in modules)
    assert call.before is not None
    return Part(call.name, call.module, call, own, call.before, attentions)


def _close_loose(found: _Found, layer: nn.Module, stream: Tensor) -> None:
    """Linears that lie in the layer itself are a part once one of them writes to the residual stream."""
    calls, found.loose = found.loose, []
    entry = next(own for own in calls if is_linear(own.module)).before
    assert entry is not None
    _add_part(found, Part("", layer, None, tuple(calls), entry, ()), stream)


def _add_part(found: _Found, part: Part, stream: Tensor) -> None:
    """A part adds what it gives, or what its writer gives where it adds the residual stream itself."""
    written = None if part.writer is None else part.writer.after
    gave = written if part.call is None else part.call.after
    if gave is None:
        raise UnsupportedFamilyError(
            f"{type(part.module).__name__}: {part.inside[-1].name} lies in the layer itself, and reads and writes the "
            f"residual stream at once. {SUPPORTED}."
        )
    if (
        written is not None
        and written.numel() == gave.numel() == stream.numel()
        and is_combination(gave, [written]) is None
    ):
        before = [own for own in found.added if own.numel() == stream.numel()]
        if is_combination(gave, [written, stream, *before]) is not None:
            found.adding.add(part.name)
            gave = written
    found.parts.append(part)
    found.added.append(gave)


def _add_norm(found: _Found, call: Call) -> None:
    """A norm is a post norm where it reads what parts gave, and a pre norm where it reads the residual stream."""
    assert call.before is not None and call.after is not None
    style = norm_style(call.module, call.before.shape[-1])
    if style is None:
        raise UnsupportedFamilyError(
            f"{call.name} ({type(call.module).__name__}): this norm follows no known formula. Supported are RMSNorm "
            "and LayerNorm, with a gain of w or 1 + w."
        )
    found.norm_outputs[call.name] = call.after
    for count in range(1, len(found.added) + 1):
        same = [own.reshape(call.before.shape) for own in found.added[-count:] if own.numel() == call.before.numel()]
        if same and is_combination(call.before, same) is not None:
            found.post_norms.append(Norm(call.name, style))
            found.added[-count:] = [call.after]
            return
    found.pre_norms.append(Norm(call.name, style))


def _check_sum(called: str, call: Call, found: _Found, inside: list[Call]) -> None:
    """Check that the layer adds what its parts give to what it reads."""
    problem = _why_no_sum(call, found, inside)
    if problem is not None:
        raise UnsupportedFamilyError(f"{called} ({type(call.module).__name__}): {problem}. {SUPPORTED}.")


def _why_no_sum(call: Call, found: _Found, inside: list[Call]) -> str | None:
    assert call.before is not None and call.after is not None
    added = [own for own in found.added if own.numel() == call.after.numel()]
    is_one_stream = call.before.numel() == call.after.numel() and len(added) == len(found.added)
    numbers = is_combination(call.after, [call.before, *added]) if is_one_stream else None
    if numbers is None:
        return _who_changes_the_stream(call, found, inside, added, is_one_stream=is_one_stream)
    unused = [part.name for part, number in zip(found.parts, numbers[1:], strict=False) if abs(number) < LEAST]
    if unused:
        return f"what {', '.join(unused)} gives is not added, but read by another part"
    return None if abs(numbers[0] - 1) < LEAST else f"the residual stream is multiplied by {numbers[0]:.3g}, expected 1"


def _who_changes_the_stream(
    call: Call, found: _Found, inside: list[Call], added: list[Tensor], *, is_one_stream: bool
) -> str:
    assert call.after is not None
    own = [name for name, value in call.module.named_parameters(recurse=False) if value.numel() > 1]
    for other in inside:
        if is_norm(other.module) and is_same(other.after, call.after):
            return f"the residual stream is what a norm gives: {other.name}"
    for name, output in found.norm_outputs.items():
        if output.numel() == call.after.numel() and is_combination(call.after, [output, *added]) is not None:
            return f"the residual is what the norm {name} gives, expected what the layer reads"
    if not is_one_stream:
        return "it has another shape than what its parts give, as of several residual streams"
    if own:
        return f"its own parameters scale the residual stream: {', '.join(own)}"
    return "what it gives is not what it reads plus what its parts give"


def derive_block(part: Part, *, adds_itself: bool = False) -> Block:
    """Derive how a part of a layer is expanded.

    Args:
        part: The part.
        adds_itself: Whether it adds the residual stream to what it gives, and so cannot run beside it.

    Returns:
        The block with its strongest treatment, and the reason why there is no stronger one.

    Raises:
        UnsupportedFamilyError: If there is none.
    """
    group = "attn" if part.attentions or part.mixes_tokens() else "ffn"
    block = Block(part.name, type(part.module).__name__, group, "block")  # type: ignore[arg-type]
    if (reason := _why_block(part, adds_itself)) is None:
        return _split(part, replace(block, treatment="edges", linears=_edges(part)))
    if adds_itself or not part.name:
        where = part.name or type(part.module).__name__
        raise UnsupportedFamilyError(f"{where}: {reason}, and it adds the residual stream itself. {SUPPORTED}.")
    return replace(block, reason=reason)


def _why_block(part: Part, adds_itself: bool) -> str | None:
    """Why all of a part has to stay as it is; None where its linears can be expanded."""
    names = [own.name for own in part.linears]
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


def _edges(part: Part) -> tuple[Linear, ...]:
    writer = part.writer
    assert writer is not None
    reading = tuple(Linear(own.name, ("read",), *_shape(own)) for own in part.readers)
    return (*reading, Linear(writer.name, ("write",), *_shape(writer)))


def _shape(call: Call) -> tuple[int, tuple[int, ...]]:
    inputs, outputs = features(call.module)
    return inputs, (outputs,)


def _split(part: Part, block: Block) -> Block:
    try:
        with torch.random.fork_rng(devices=[]):
            return split_attention(part, block) if block.group == "attn" else split_mlp(part, block)
    except RefusedError as reason:
        return replace(block, reason=str(reason))
