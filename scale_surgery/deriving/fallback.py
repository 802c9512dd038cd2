"""The next weaker treatment, for blocks whose stronger one was not proved or about which two twins disagree."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from scale_surgery.planning.architecture import STREAMS, Architecture, Block, Kind, Linear, Treatment

STRENGTH = get_args(Treatment)
NOT_PROVED = "the stronger treatment did not pass its proof on a twin"


def weaker_block(block: Block, reason: str = NOT_PROVED) -> Block | None:
    """The block in the next weaker treatment; None where there is none."""
    if block.treatment == "split" and any(_can_be_by_head(linear) for linear in block.linears):
        linears = (replace(linear, fused_by="head") if _can_be_by_head(linear) else linear for linear in block.linears)
        return replace(block, linears=tuple(linears))
    if block.treatment == "split":
        return _edges(block, reason)
    if block.treatment == "edges" and block.name and block.mute:
        return replace(block, treatment="block", reason=reason, linears=())
    return None


def _can_be_by_head(linear: Linear) -> bool:
    return linear.fused_by == "section" and len(set(linear.roles)) > 1 and "q" in linear.roles


def _edges(block: Block, reason: str) -> Block:
    """The block with only the linears that read or write the residual stream."""
    linears = tuple(map(_edge, block.linears))
    kept = Block(block.name, block.kind, block.group, "edges", reason, linears)
    return replace(kept, mute=block.mute, norm=block.norm, post_norm=block.post_norm)


def _edge(linear: Linear) -> Linear:
    is_reader = STREAMS[linear.roles[0]][0] == "residual"
    return Linear(linear.name, ("read" if is_reader else "write",), linear.inputs, (sum(linear.outputs),))


def weaker(architecture: Architecture, kind: str) -> Architecture | None:
    """The architecture with the blocks of one class in the next weaker treatment; None where there is none."""
    blocks = [block for layer_kind in architecture.kinds for block in layer_kind.blocks if block.kind == kind]
    # layers in which these blocks are treated in a weaker way already wait for the others
    strongest = min((STRENGTH.index(block.treatment) for block in blocks), default=0)
    kinds = tuple(_weaker_kind(layer_kind, kind, STRENGTH[strongest]) for layer_kind in architecture.kinds)
    if None in kinds or kinds == architecture.kinds:
        return None
    return replace(architecture, kinds=kinds)  # type: ignore[arg-type]


def hooked(architecture: Architecture) -> Architecture | None:
    """The same architecture whose up stream begins before the first layer; None where it does so already."""
    if architecture.enters == "hook":
        return None
    return replace(architecture, enters="hook", padded=(), first_norms=())


def _weaker_kind(layer_kind: Kind, kind: str, treatment: str) -> Kind | None:
    blocks = [
        weaker_block(block) if block.kind == kind and block.treatment == treatment else block
        for block in layer_kind.blocks
    ]
    return None if None in blocks else replace(layer_kind, blocks=tuple(block for block in blocks if block))
