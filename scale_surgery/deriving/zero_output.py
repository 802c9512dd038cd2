"""Which tensors have to be zero for a block to add nothing."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from scale_surgery.deriving.layer import TwinLayer
from scale_surgery.deriving.part import LayerPart
from scale_surgery.planning.architecture import numberless


def find_mute(part: LayerPart, *, adds_itself: bool = False) -> list[Tensor]:
    """Find the parameters of a part that, being zero, make it give zeros; as few as possible, the last ones."""
    if part.call is None or adds_itself:
        return [] if part.writer is None else list(part.writer.module.parameters())
    parameters = sorted(part.module.parameters(), key=lambda parameter: _writes(part, parameter))
    values = {id(parameter): parameter.detach().clone() for parameter in parameters}
    with torch.no_grad():
        for parameter in parameters:
            parameter.zero_()
        needed = _needed(part, parameters, values) if _is_silent(part) else []
        for parameter in parameters:
            parameter.copy_(values[id(parameter)])
    return needed


def _needed(part: LayerPart, parameters: list[nn.Parameter], values: dict[int, Tensor]) -> list[Tensor]:
    """Restore one parameter after the other; those that make the output non-zero have to be zero."""
    needed: list[Tensor] = []
    for parameter in parameters:
        parameter.copy_(values[id(parameter)])
        if not _is_silent(part):
            parameter.zero_()
            needed.append(parameter)
    return needed


def _writes(part: LayerPart, parameter: nn.Parameter) -> int:
    """Order in which parameters are restored: those that write to the residual stream last, the writer after all."""
    if part.writer is not None and any(tensor is parameter for tensor in part.writer.module.parameters()):
        return 2
    return int(parameter.dim() == 2 and parameter.shape[0] == part.hidden)


def _is_silent(part: LayerPart) -> bool:
    assert part.call is not None
    gave = part.call.rerun(part.entry.reshape(part.call.read.shape))  # type: ignore[union-attr]
    return gave is not None and not bool(gave.any())


def find_mutes(model: PreTrainedModel, path: str, layers: Mapping[int, TwinLayer]) -> dict[int, list[tuple[str, ...]]]:
    """Find what mutes each block of some layers."""
    mutes: dict[int, list[tuple[str, ...]]] = {}
    for number, layer in layers.items():
        names = {id(tensor): name for name, tensor in model.get_submodule(f"{path}.{number}").named_parameters()}
        muted = (find_mute(part, adds_itself=part.name in layer.adding) for part in layer.parts)
        mutes[number] = [tuple(sorted({numberless(names[id(tensor)]) for tensor in tensors})) for tensors in muted]
    return mutes
