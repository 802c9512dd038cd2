"""An MLP whose inner features can be widened: linears, an activation, and nothing that mixes features."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from scale_surgery.deriving.part import Change, LayerPart, SplitError, features
from scale_surgery.deriving.watch import ModuleCall, depends, is_same
from scale_surgery.planning.architecture import Block, Linear, Role


def describe_mlp(part: LayerPart, block: Block) -> Block:
    """A split MLP, with its roles and sizes; raises SplitError where its inner features cannot be widened."""
    writer = part.writer
    assert writer is not None
    inner = features(writer.module)[0]
    if part.uncalled_parameters:
        raise SplitError(f"it has parameters of its own: {', '.join(part.uncalled_parameters)}")
    if part.inner_linears:
        raise SplitError(f"there are other linears inside: {', '.join(call.name for call in part.inner_linears)}")
    activation = _activation(part, inner)
    linears = tuple(_reader(call, activation, inner) for call in part.readers)
    _check_roles(linears)
    _check_alike(part, linears)
    down = Linear(writer.name, ("down",), inner, (part.hidden,))
    return replace(
        block, treatment="split", reason="", linears=(*linears, down), activations=(activation.name,), inner=inner
    )


def _activation(part: LayerPart, inner: int) -> ModuleCall:
    """The one module between the linears; it has no parameters but single numbers."""
    leaves = part.leaves
    for leaf in leaves:
        assert leaf.before is not None
        if leaf.before.shape[-1] != inner or any(p.numel() != 1 for p in leaf.module.parameters()):
            raise SplitError(f"{leaf.name} ({type(leaf.module).__name__}) lies between its linears")
    if len(leaves) != 1:
        raise SplitError("its activation is a function and no module" if not leaves else "it has several activations")
    return leaves[0]


def _reader(reader: ModuleCall, activation: ModuleCall, inner: int) -> Linear:
    assert reader.gave is not None and activation.gave is not None
    inputs, width = features(reader.module)
    mask = depends(activation.gave, reader.gave)[0]
    if width == inner:
        return Linear(reader.name, ("gate",) if mask is not None else ("up_proj",), inputs, (inner,))
    if width != 2 * inner or mask is None:
        raise SplitError(f"{reader.name} gives {width} features, expected {inner} or twice as many")
    halves = [bool(half.all()) for half in torch.split(mask, inner)]
    orders: dict[tuple[bool, ...], tuple[Role, ...]] = {
        (True, False): ("gate", "up_proj"),
        (False, True): ("up_proj", "gate"),
    }
    if tuple(halves) not in orders or int(mask.sum()) != inner:
        raise SplitError(f"{reader.name} mixes gate and up features")
    return Linear(reader.name, orders[tuple(halves)], inputs, (inner, inner))


def _check_roles(linears: tuple[Linear, ...]) -> None:
    roles = sorted(role for linear in linears for role in linear.roles)
    if roles not in (["gate"], ["gate", "up_proj"]):
        raise SplitError("its linears are no gate and up projection")


def without_gate(block: Block) -> Block:
    """Without a gate, the linear before the activation is an up projection."""
    if any("up_proj" in linear.roles for linear in block.linears) or block.group == "attn":
        return block
    linears = (replace(linear, roles=("up_proj",)) if linear.roles == ("gate",) else linear for linear in block.linears)
    return replace(block, linears=tuple(linears))


def _check_alike(part: LayerPart, linears: tuple[Linear, ...]) -> None:
    """Features in another order give the same in that order; otherwise something between mixes them."""
    if part.call is None:
        return _check_nothing_between(part)
    calls = {call.name: call.module for call in part.readers}
    changed = part.written({calls[linear.name]: _rolled(linear) for linear in linears})
    writer = part.writer
    assert writer is not None and writer.before is not None and changed is not None
    if not torch.allclose(changed, writer.before.roll(1, -1), atol=1e-5, rtol=1e-4):
        raise SplitError("its inner features are not alike: in another order they give something else")


def _check_nothing_between(part: LayerPart) -> None:
    """Check that the writer reads the activation's output; linears in the layer itself cannot be run alone."""
    (activation,), writer = part.leaves, part.writer
    assert writer is not None
    if len(part.readers) != 1 or not is_same(activation.after, writer.before):
        raise SplitError(f"something lies between {activation.name} and {writer.name}")


def _rolled(linear: Linear) -> Change:
    def change(result: Tensor) -> Tensor:
        return torch.cat([section.roll(1, -1) for section in torch.split(result, list(linear.outputs), -1)], -1)

    return change
