"""Which tensors have to be zero for a block to add nothing, by their names on disk."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from scale_surgery.checkpoint.files import scratch_folder
from scale_surgery.deriving.layer import Layer
from scale_surgery.deriving.part import Part
from scale_surgery.running.loading import quiet_transformers


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


def names_on_disk(model: PreTrainedModel, muted: list[Tensor]) -> set[str]:
    """Names under which a twin saves parameters.

    Args:
        model: The twin.
        muted: Some of its parameters.

    Returns:
        The names of all tensors on disk that come from them, the only ones there that are all zero.
    """
    kept = [own.detach().clone() for own in muted]
    with torch.no_grad(), scratch_folder() as folder, quiet_transformers():
        for own in muted:
            own.zero_()
        model.save_pretrained(folder)
        for own, value in zip(muted, kept, strict=True):
            own.copy_(value)
        files = [load_file(file) for file in folder.glob("*.safetensors")]
    return {name for tensors in files for name, own in tensors.items() if own.is_floating_point() and not own.any()}


def ends_of(names: set[str], layer: int) -> tuple[str, ...]:
    """Ends of names of tensors of one layer; one end for all experts."""
    inside = {rest for name in names for number, rest in [_split_number(name)] if number == layer}
    return tuple(sorted({_split_number(rest)[1] or rest for rest in inside}))


def _split_number(name: str) -> tuple[int | None, str]:
    """The first number of a name, and what follows it: first that of the layer, then that of the expert."""
    match = re.match(r"(?:.*?\.)??(\d+)\.(.*)", name)
    return (int(match[1]), match[2]) if match else (None, "")


def find_mutes(model: PreTrainedModel, layers: Mapping[int, Layer]) -> dict[int, list[tuple[str, ...]]]:
    """Find what mutes each block of some layers.

    Args:
        model: The twin.
        layers: Its layers, by number.

    Returns:
        For each layer the ends of names, block by block.
    """
    always = names_on_disk(model, [])
    found: dict[int, list[tuple[str, ...]]] = {number: [] for number in layers}
    for place in range(max(len(own.parts) for own in layers.values())):
        parts = {number: own.parts[place] for number, own in layers.items() if place < len(own.parts)}
        muted = [
            tensor
            for number, part in parts.items()
            for tensor in find_mute(part, adds_itself=part.name in layers[number].adding)
        ]
        names = names_on_disk(model, muted) - always if muted else set()
        for number in parts:
            found[number].append(ends_of(names, number))
    return found
