"""Which tensors have to be zero for a block to add nothing."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from scale_surgery.deriving.layer import TwinLayer
from scale_surgery.deriving.part import LayerPart
from scale_surgery.planning.architecture import numberless


def zero_output_names(
    model: PreTrainedModel, path: str, layers: Mapping[int, TwinLayer]
) -> dict[int, list[tuple[str, ...]]]:
    """For each layer and block the names of the parameters that are zero in a block that adds nothing."""
    mutes: dict[int, list[tuple[str, ...]]] = {}
    for number, layer in layers.items():
        names = {id(tensor): name for name, tensor in model.get_submodule(f"{path}.{number}").named_parameters()}
        tensors = (_zeroed(part, adds_itself=part.name in layer.adding) for part in layer.parts)
        # one name for all experts
        mutes[number] = [tuple(sorted({numberless(names[id(tensor)]) for tensor in zeroed})) for zeroed in tensors]
    return mutes


def _zeroed(part: LayerPart, *, adds_itself: bool) -> list[Tensor]:
    """The fewest, last parameters that give zeros by being zero; none where even all of them do not."""
    # of a part that adds the residual stream itself, its writer's alone
    if part.call is None or adds_itself:
        return [] if part.writer is None else list(part.writer.module.parameters())
    parameters = sorted(part.module.parameters(), key=lambda parameter: _order(part, parameter))
    values = [parameter.detach().clone() for parameter in parameters]
    needed: list[Tensor] = []
    with torch.no_grad():
        for parameter in parameters:
            parameter.zero_()
        if _gives_zeros(part):
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)
                if not _gives_zeros(part):
                    parameter.zero_()
                    needed.append(parameter)
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
    return needed


def _order(part: LayerPart, parameter: nn.Parameter) -> int:
    """Parameters that write to the residual stream are restored last, those of the writer after all others."""
    if part.writer is not None and any(tensor is parameter for tensor in part.writer.module.parameters()):
        return 2
    return int(parameter.dim() == 2 and parameter.shape[0] == part.hidden)


def _gives_zeros(part: LayerPart) -> bool:
    assert part.call is not None
    output = part.call.rerun(part.entry.reshape(part.call.read.shape))  # type: ignore[union-attr]
    return output is not None and not bool(output.any())
