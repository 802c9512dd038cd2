"""Derive the parts of a twin around its layers: embedding and norms before them, final norm and head after them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from scale_surgery.deriving.build import LayersPlace, read, text_config, token_ids
from scale_surgery.deriving.norms import is_norm, norm_style
from scale_surgery.deriving.part import is_linear
from scale_surgery.deriving.watch import ModuleCall, Trace, is_combination, is_same
from scale_surgery.errors import Problem, UnsupportedFamilyError
from scale_surgery.planning.architecture import Norm

# a cap that no logits of a twin keep to by chance
SMALL_CAP = 1e-3


@dataclass(frozen=True)
class Outside:
    """Facts around the layers; names but the head's lie inside the base model. `is_plain`: nothing else is there."""

    embedding: str
    padded: tuple[str, ...]
    first_norms: tuple[Norm, ...]
    is_plain: bool
    final_norm: Norm
    head: str


def derive_outside(trace: Trace, model: PreTrainedModel, place: LayersPlace) -> Outside:
    """Derive the modules around the layers of a twin."""
    layers = [call for call in trace.calls if call.name.rpartition(".")[0] == place.path]
    start = trace.calls.index(next(call for call in trace.calls if call.name.startswith(f"{place.path}.")))
    before, after = trace.calls[:start], trace.calls[trace.calls.index(layers[-1]) + 1 :]
    names = {module: name for name, module in model.named_modules()}
    embedding = names[model.get_input_embeddings()]
    # parts for images or sound put features of the model's width where embeddings of tokens are
    is_text = not _has_other_parts(trace, model, place)
    padded, norms, is_plain = _begin(before, layers[0], embedding, place) if is_text else ((), (), False)
    final = _final_norm(after, layers[-1], place)
    head = _head(after, final, model, names)
    style = norm_style(final.module, layers[-1].after.shape[-1])  # type: ignore[union-attr]
    if style is None:
        raise UnsupportedFamilyError(Problem("norm-unknown", f"{final.name} ({type(final.module).__name__})"))
    return Outside(_inside(embedding, place), padded, norms, is_plain, Norm(_inside(final.name, place), style), head)


def _has_other_parts(trace: Trace, model: PreTrainedModel, place: LayersPlace) -> bool:
    """Return True if modules with parameters lie outside the layers, and a text does not run them."""
    ran = {call.module for call in trace.calls}
    outside = (module for name, module in model.named_modules() if not name.startswith(f"{place.path}."))
    return any(module not in ran and any(True for _ in module.parameters(recurse=False)) for module in outside)


def _inside(name: str, place: LayersPlace) -> str:
    return name.removeprefix(f"{place.base}.") if place.base else name


def _begin(
    calls: tuple[ModuleCall, ...], first: ModuleCall, embedding: str, place: LayersPlace
) -> tuple[tuple[str, ...], tuple[Norm, ...], bool]:
    """Return what is added to the embeddings, their norms, and True if nothing else runs before the first layer."""
    assert first.before is not None
    stream, padded, norms, hidden = list[Tensor](), list[str](), list[Norm](), first.before.shape[-1]
    for call in calls:
        value = _as(call.after, first.before)
        if call.name == embedding and value is not None:
            stream.append(value)
        elif value is None or list(call.module.children()):
            continue
        elif is_norm(call.module) and _is_sum(call.before, stream) and (style := norm_style(call.module, hidden)):
            norms.append(Norm(_inside(call.name, place), style))
            stream = [value]
        # an embedding of something else than tokens, such as positions, does not read the stream
        elif "embed" in f"{type(call.module).__name__} {call.name}".lower() and not _reads_stream(call, hidden):
            padded.append(_inside(call.name, place))
            stream.append(value)
    # others read the embeddings too where single layers have inputs of their own
    modules = (call for call in calls if not is_norm(call.module) and not list(call.module.children()))
    read_by_others = any(
        _reads_stream(call, hidden) and any(True for _ in call.module.parameters()) for call in modules
    )
    is_plain = bool(stream) and _is_sum(first.before, stream) and not read_by_others
    return (tuple(padded), tuple(norms), True) if is_plain else ((), (), False)


def _as(tensor: Tensor | None, like: Tensor) -> Tensor | None:
    """A tensor in the shape of another, expanded over the batch; None where its features differ."""
    if tensor is None or not tensor.is_floating_point() or tensor.shape[-1] != like.shape[-1]:
        return None
    if tensor.dim() == like.dim() - 1:
        tensor = tensor.unsqueeze(0)
    return tensor.expand_as(like) if tensor.shape[1:] == like.shape[1:] else None


def _is_sum(target: Tensor | None, parts: list[Tensor]) -> bool:
    if target is None or not parts or target.numel() != parts[0].numel():
        return False
    numbers = is_combination(target, parts)
    return numbers is not None and all(abs(number) > SMALL_CAP for number in numbers)


def _reads_stream(call: ModuleCall, hidden: int) -> bool:
    return call.before is not None and call.before.is_floating_point() and call.before.shape[-1] == hidden


def _final_norm(calls: tuple[ModuleCall, ...], last: ModuleCall, place: LayersPlace) -> ModuleCall:
    norms = [call for call in calls if is_norm(call.module) and is_same(call.before, last.after)]
    if not norms or not norms[0].name.startswith(f"{place.base}." if place.base else ""):
        names = [call.name for call in calls if call.name] or ["none"]
        raise UnsupportedFamilyError(Problem("final-norm-missing", last.name, names=names))
    return norms[0]


def _head(calls: tuple[ModuleCall, ...], final: ModuleCall, model: PreTrainedModel, names: dict[nn.Module, str]) -> str:
    whole: Any = model
    module = whole.get_output_embeddings()
    call = next((inner_call for inner_call in calls if inner_call.module is module), None)
    if module is None or call is None or not is_linear(module):
        raise UnsupportedFamilyError(Problem("head-no-linear", type(model).__name__, kind=type(module).__name__))
    assert call.before is not None and final.after is not None
    if call.before.numel() != final.after.numel() or is_combination(call.before, [final.after]) is None:
        raise UnsupportedFamilyError(Problem("head-off-norm", names[module], norm=final.name))
    return names[module]


def find_softcap(model: PreTrainedModel) -> tuple[str, float | None] | None:
    """Find the key of the config that caps the logits, by setting it to a small number."""
    config = text_config(model)
    for key in [name for name in config.to_dict() if "softcap" in name and "attn" not in name]:
        before = read(config, key)
        setattr(config, key, SMALL_CAP)
        with torch.no_grad():
            logits = model(input_ids=token_ids(model.config), use_cache=False).logits
        setattr(config, key, before)
        if bool(logits.abs().max() <= SMALL_CAP * 1.001):
            default = read(type(config)(), key)
            return key, None if default is None else float(default)
    return None
