"""An expanded model around a stock one that is loaded: nothing of the base is copied, and it stays as it is.

A quantised linear stays the quantiser's module, which multiplies as it does in the base; what is expanded of it is a
class before its own, as with any other. Where the base is spread over devices, so is the expanded model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery import modeling
from scale_surgery.checkpoint.headers import TensorInfo
from scale_surgery.errors import CheckpointError
from scale_surgery.planning.architecture import Architecture
from scale_surgery.running.stored_names import reading_of

if TYPE_CHECKING:
    from torch import Tensor

# their modules share a weight by sharing the parameter, and multiply by their own forward
QUANTISERS = ("bitsandbytes", "torchao")
QUANTISATION_KEY = "quantization_config"
# what accelerate puts into a module
HOOKED = ("forward", "_old_forward", "_hf_hook")


@dataclass(frozen=True)
class Blocks:
    """Expansion tensors in files.

    Attributes:
        name: What the expansion is called.
        path: The folder in which they lie.
        tensors: Where each lies in it.
        dtype: The dtype that was asked for when they were made; None for the base's.
    """

    name: str
    path: Path
    tensors: Mapping[str, TensorInfo]
    dtype: str | None


def quantiser_of(model: Any) -> str | None:
    """Name of the quantiser of a loaded model, as transformers has it; None where it is not quantised."""
    found = getattr(model.config, QUANTISATION_KEY, None)
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, Mapping) else found.quant_method
    return str(getattr(method, "value", method))


def quantised_modules(model: Any) -> dict[str, Any]:
    """The modules of a loaded model whose weight is quantised, by their names."""
    from torch import nn

    if quantiser_of(model) is None:
        return {}
    return {
        name: module
        for name, module in model.named_modules()
        if type(module._parameters.get("weight")) not in (nn.Parameter, type(None))
    }


def descriptions(module: Any) -> dict[str, Any]:
    """What describes the weight of a quantised module, to be shared with it: some moves between both as it runs."""
    from torch import nn

    return {key: value for key, value in vars(module).items() if key not in {*vars(nn.Module()), *HOOKED}}


def quantised_shape(module: Any) -> tuple[int, int]:
    """Shape of a weight before it was quantised: four bits are packed into another."""
    from transformers.pytorch_utils import Conv1D

    shape = module.out_features, module.in_features
    return (shape[1], shape[0]) if getattr(module, "source_cls", None) is Conv1D else shape


def check_shareable(model: Any) -> None:
    """Refuse a loaded model whose weights cannot be another's as they lie.

    Raises:
        CheckpointError: If some are offloaded, or quantised in a way that no gradient passes, or that is not known.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise CheckpointError(
            "model: some of its weights are offloaded, to a disk or from an accelerator to the CPU, expected all in "
            "the memory of the device that computes with them. Load it quantised, or over more devices."
        )
    quantiser = quantiser_of(model)
    if quantiser not in (None, *QUANTISERS):
        raise CheckpointError(
            f"model: is quantised by {quantiser}, expected {' or '.join(QUANTISERS)}, or the weights that the "
            "expansion was made on. Load one of these."
        )
    quantised = quantised_modules(model)
    outside = [name for name, module in quantised.items() if not _is_inside(module, model)]
    if outside:
        raise CheckpointError(
            f"model: {outside[0]} is quantised, expected linears inside layers alone, as transformers quantises by "
            "default. Leave it out: llm_int8_skip_modules of bitsandbytes, modules_to_not_convert of torchao."
        )
    if any(_is_packed(module) for module in quantised.values()):
        raise CheckpointError(
            "model: bitsandbytes packed its weights for inference on this CPU when it ran, and lets no gradient "
            "through them any more. Add the expansion before the model runs; or give its folder or Hub id."
        )


def expanded_class_of(model: Any, architecture: Architecture) -> Any:
    """The expanded class of a stock model.

    Raises:
        CheckpointError: If the model is of another class than the stock ones of that architecture.
    """
    classes = modeling.model_classes(architecture)
    stock = {expanded.__bases__[1]: expanded for name, expanded in classes.items() if name != "AutoConfig"}
    if type(model) not in stock:
        names = " or ".join(sorted(known.__name__ for known in stock))
        raise CheckpointError(
            f"model: is a {type(model).__name__}, expected {names} as from_pretrained gives it, or a folder or Hub id."
        )
    return stock[type(model)]


def share_weights(model: Any, expanded_class: Any, config: Mapping[str, Any], blocks: Blocks) -> Any:
    """Build an expanded model around the weights of a stock one.

    Args:
        model: The stock model; see `check_shareable`.
        expanded_class: The expanded class of its own.
        config: config.json of the expanded model.
        blocks: The expansion tensors.

    Returns:
        The expanded model; its expansion tensors require gradients, its base does not.

    Raises:
        CheckpointError: If the model has other tensors than the expansion was made for.
    """
    import torch

    unquantised = {key: value for key, value in config.items() if key != QUANTISATION_KEY}
    # transformers' way of giving a dtype and an attention kernel to a model that is not loaded from files
    with torch.device("meta"):
        expanded = expanded_class._from_config(
            expanded_class.config_class.from_dict(unquantised), dtype=model.dtype, **_kernels(model.config)
        )
    quantised = quantised_modules(model)
    base = _plain(model.state_dict(), quantised)
    own = dict(_own_tensors(blocks, expanded, model.state_dict()))
    missing, unexpected = expanded.load_state_dict(base | own, strict=False, assign=True)
    missing = [name for name in missing if name.removesuffix(".weight") not in quantised]
    if missing or unexpected:
        found = ", ".join([*missing, *unexpected])
        raise CheckpointError(
            f"model: has other tensors than {blocks.name} was made for ({found}). Load it with from_pretrained, and "
            "change no module before the expansion is added."
        )
    for name, module in quantised.items():
        _take_over(module, expanded.get_submodule(name))
    expanded.is_base_quantised = bool(quantised)
    if quantised:
        # by this transformers knows what cannot be cast
        expanded.quantization_method = model.quantization_method
    _copy_buffers(model, expanded)
    expanded.tie_weights()
    expanded.freeze_base()
    expanded.align_copies()
    if getattr(model, "generation_config", None) is not None:
        expanded.generation_config = deepcopy(model.generation_config)
    spread(model, expanded)
    return expanded.train(model.training)


def is_hooked(model: Any) -> bool:
    """Whether hooks of accelerate carry what a loaded model computes from device to device."""
    return any(hasattr(module, "_hf_hook") for module in model.modules())


def _is_inside(module: Any, model: Any) -> bool:
    from torch import nn

    return isinstance(module, nn.Linear) and module is not model.get_output_embeddings()


def _is_packed(module: Any) -> bool:
    return getattr(getattr(module.weight, "quant_state", None), "packing_format_for_cpu", False)


def _plain(tensors: Mapping[str, Tensor], quantised: Collection[str]) -> dict[str, Tensor]:
    """Tensors of a state without those of quantised weights; biases are as they were."""
    inside = tuple(f"{name}." for name in quantised)
    return {name: own for name, own in tensors.items() if not name.startswith(inside) or name.endswith(".bias")}


def _take_over(module: Any, expanded: Any) -> None:
    """Let a module of the expanded model multiply as a quantised one does, by the same weight."""
    modules = import_module(f"{modeling.__name__}.expanded_modules")
    if hasattr(module, "support_avx512bf16_for_cpu"):
        # bitsandbytes would pack the weight for inference, and then lets no gradient through
        module.support_avx512bf16_for_cpu = False
    is_expanded = isinstance(expanded, modules.ExpandedModule)
    kind = type(expanded).__bases__[0]
    expanded.__class__ = modules.expanded_class(kind, type(module)) if is_expanded else type(module)
    vars(expanded).update({**descriptions(module), **vars(expanded)})
    expanded._parameters["weight"] = module.weight


def _kernels(config: Any) -> dict[str, Any]:
    """How a model computes attention, and what its experts do where there are any."""
    found = {name: _by_part(config, f"_{name}") for name in ("attn_implementation", "experts_implementation")}
    return {name: own for name, own in found.items() if own[""] is not None}


def _by_part(config: Any, name: str) -> dict[str, Any]:
    """A setting of a model under "", and of each model inside it, in transformers' form: each may have its own."""
    parts = {key: getattr(config, key, None) for key in config.sub_configs}
    inside = {key: _by_part(own, name) for key, own in parts.items() if own is not None}
    return {"": getattr(config, name, None), **inside}


def _own_tensors(blocks: Blocks, expanded: Any, base: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Expansion tensors by their names in memory, each where the stock weight beside it lies, in its dtype."""
    import torch
    from safetensors import safe_open

    places = reading_of(expanded).places(blocks.tensors)
    known = set(expanded.state_dict())
    names = {name: place.name for name, place in places.items() if place.name in known}
    # what was asked for in float32 stays so, also in a model in half precision
    kept = torch.float32 if blocks.dtype == "float32" else None
    for shard in sorted({info.file for info in blocks.tensors.values()}):
        with safe_open(blocks.path / shard, framework="pt") as file:
            for name in (name for name in names if blocks.tensors[name].file == shard):
                beside = _beside(names[name], base)
                yield names[name], file.get_tensor(name).to(device=beside.device, dtype=kept or expanded.dtype)


def _beside(name: str, base: Mapping[str, Tensor]) -> Tensor:
    """A base tensor of the same module, or of what is around it: it lies where a new tensor has to lie."""
    module = name.rpartition(".")[0]
    while module and f"{module}.weight" not in base:
        inside = next((own for own in base if own.startswith(f"{module}.")), None)
        if inside is not None:
            return base[inside]
        module = module.rpartition(".")[0]
    return base[f"{module}.weight"]


def _copy_buffers(model: Any, expanded: Any) -> None:
    """Rotary frequencies and the like, which no file holds, and how long a text they reach."""
    saved = model.state_dict()
    for name, buffer in model.named_buffers():
        module, _, last = name.rpartition(".")
        expanded.get_submodule(module).register_buffer(last, buffer.clone(), persistent=name in saved)
    for name, module in model.named_modules():
        reach = {key: value for key, value in vars(module).items() if key.endswith("max_seq_len_cached")}
        vars(expanded.get_submodule(name)).update(reach)


def unhook(model: Any) -> None:
    """Take off a copy the hooks of its original: they would go on calling the forward of the class it had then."""
    from accelerate.hooks import remove_hook_from_module

    for module in model.modules():
        if hasattr(module, "_hf_hook"):
            remove_hook_from_module(module)
            del module.forward


def spread(model: Any, expanded: Any) -> None:
    """Let the expanded model compute where the stock one does: hooks belong to the modules of one model."""
    from accelerate import dispatch_model

    places = getattr(model, "hf_device_map", None)
    if places is None:
        return
    if is_hooked(model):
        # what only the expanded model has reads what leaves the base
        own = {name: list(places.values())[-1] for name, _ in expanded.named_children() if not hasattr(model, name)}
        own = {} if "" in places else own
        skipped = getattr(expanded, "_skip_keys_device_placement", None)
        dispatch_model(expanded, {**places, **own}, skip_keys=skipped, force_hooks=True)
    expanded.hf_device_map = dict(places)
