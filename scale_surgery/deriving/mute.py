"""Which tensors have to be zero for a block to add nothing."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from scale_surgery.deriving.layer import Layer
from scale_surgery.deriving.part import Part
from scale_surgery.planning.architecture import numberless


def find_mute(part: Part, *, adds_itself: bool = False) -> list[Tensor]:
    """Find the parameters of a part that, being zero, make it give zeros; as few as possible, the last ones.

    Args:
        part: A part of a layer of a twin.
        adds_itself: Whether it adds the residual stream, so that its writer alone has to be silent.

    Returns:
        The parameters; none where even all of them being zero does not do it.
    """
    if part.call is None or adds_itself:
        return [] if part.writer is None else list(part.writer.module.parameters())
    parameters = sorted(part.module.parameters(), key=lambda own: _writes(part, own))
    kept = {id(own): own.detach().clone() for own in parameters}
    with torch.no_grad():
        for own in parameters:
            own.zero_()
        found = _needed(part, parameters, kept) if _is_silent(part) else []
        for own in parameters:
            own.copy_(kept[id(own)])
    return found


def _needed(part: Part, parameters: list[nn.Parameter], kept: dict[int, Tensor]) -> list[Tensor]:
    """Give back one parameter after the other; those after which the part is heard again have to be zero."""
    needed: list[Tensor] = []
    for own in parameters:
        own.copy_(kept[id(own)])
        if not _is_silent(part):
            own.zero_()
            needed.append(own)
    return needed


def _writes(part: Part, parameter: nn.Parameter) -> int:
    """What writes to the residual stream is given back last, first of all the writer."""
    if part.writer is not None and any(own is parameter for own in part.writer.module.parameters()):
        return 2
    return int(parameter.dim() == 2 and parameter.shape[0] == part.hidden)


def _is_silent(part: Part) -> bool:
    assert part.call is not None
    gave = part.call.again(part.entry.reshape(part.call.read.shape))  # type: ignore[union-attr]
    return gave is not None and not bool(gave.any())


def find_mutes(model: PreTrainedModel, path: str, layers: Mapping[int, Layer]) -> dict[int, list[tuple[str, ...]]]:
    """Find what mutes each block of some layers.

    Args:
        model: The twin.
        path: Path of its list of layers.
        layers: Its layers, by number.

    Returns:
        For each layer the names inside it, block by block; one for all experts.
    """
    found: dict[int, list[tuple[str, ...]]] = {}
    for number, layer in layers.items():
        names = {id(own): name for name, own in model.get_submodule(f"{path}.{number}").named_parameters()}
        muted = (find_mute(part, adds_itself=part.name in layer.adding) for part in layer.parts)
        found[number] = [tuple(sorted({numberless(names[id(own)]) for own in tensors})) for tensors in muted]
    return found
