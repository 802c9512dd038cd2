"""Add an expansion to a model in memory: a stock model, which is wrapped, or an expanded model.

The wrapped model shares the weights of the stock model, which is not changed. A quantised linear keeps its module. If
the base is spread over devices, so is the copy. A new tensor is on the device of the module that it expands.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery import modeling
from scale_surgery.checkpoint.expansions import BASE_KEY, EXPANSIONS_KEY, INFIX, ROUTER_KEY, expansion_of, renamed
from scale_surgery.checkpoint.headers import TensorInfo
from scale_surgery.checkpoint.numbering import CONFIG_KEY
from scale_surgery.errors import CheckpointError, PlanError, Problem
from scale_surgery.planning.architecture import Architecture
from scale_surgery.planning.base import QUANTISATION_KEY
from scale_surgery.planning.exported import model_classes
from scale_surgery.running.stored_names import reading_of

if TYPE_CHECKING:
    import torch

# quantisers with modules that share a weight by sharing the parameter
QUANTISERS = ("bitsandbytes", "torchao")
# attributes by which transformers treats a quantised model specially when saving, and refuses to train it
QUANTISED_MARKS = (
    *("hf_quantizer", "is_loaded_in_8bit", "is_loaded_in_4bit"),
    *("is_8bit_serializable", "is_4bit_serializable", "is_quantized", "quantization_method"),
)
# attributes that accelerate sets
HOOKED = ("forward", "_old_forward", "_hf_hook")
# attributes that generation sets: the compiled forward of the base, and the settings that it was compiled with
COMPILED = ("_compiled_call", "_last_compile_config")


@dataclass(frozen=True)
class StoredExpansion:
    """A stored expansion: title and path of its folder, its tensors, and the config.json of a model with it alone."""

    title: str
    path: Path
    tensors: Mapping[str, TensorInfo]
    config: Mapping[str, Any]


def is_expanded(model: Any) -> bool:
    """Return True if a model has an expanded class, from this package or from the code in its folder."""
    return hasattr(model, "add_expansion")


def quantiser_of(model: Any) -> str | None:
    """Return the name of a loaded model's quantiser, as in transformers, or None if it is not quantised."""
    config = getattr(model.config, QUANTISATION_KEY, None)
    if config is None:
        return None
    method = config.get("quant_method") if isinstance(config, Mapping) else config.quant_method
    return str(getattr(method, "value", method))


def quantised_modules(model: Any) -> dict[str, Any]:
    """Return the modules with a quantised weight in a loaded model, by name."""
    from torch import nn

    if quantiser_of(model) is None and not getattr(model, "is_base_quantised", False):
        return {}
    return {
        name: module
        for name, module in model.named_modules()
        if type(module._parameters.get("weight")) not in (nn.Parameter, type(None))
    }


def quantised_shape(module: Any) -> tuple[int, int]:
    """Return the shape of a weight before quantisation. Packed 4-bit weights have another."""
    from transformers.pytorch_utils import Conv1D

    shape = module.out_features, module.in_features
    return (shape[1], shape[0]) if getattr(module, "source_cls", None) is Conv1D else shape


def check_shareable(model: Any) -> None:
    """Check that a wrapped model can share the weights of a loaded model."""
    if getattr(model, "is_fused", False):
        raise CheckpointError(Problem("model-fused", "model"))
    if any(parameter.is_meta for parameter in model.parameters()):
        raise CheckpointError(Problem("model-offloaded", "model"))
    quantiser = quantiser_of(model)
    if quantiser not in (None, *QUANTISERS):
        raise CheckpointError(Problem("quantiser-unfit", "model", quantiser=quantiser, quantisers=QUANTISERS))
    quantised = quantised_modules(model)
    outside = [name for name, module in quantised.items() if not _is_inside(module, model)]
    if outside:
        raise CheckpointError(Problem("module-quantised", f"model: {outside[0]}"))
    if any(_is_packed(module) for module in quantised.values()):
        raise CheckpointError(Problem("weights-packed", "model"))


def check_class(model: Any, architecture: Architecture) -> None:
    """Check that a model has one of an architecture's stock classes, or an expanded class of these."""
    classes = [made for name, made in model_classes(architecture).items() if name != "AutoConfig"]
    stock = {made.__bases__[1] for made in classes}
    # the code in a model's folder defines a class of the same name
    if type(model) in stock or (is_expanded(model) and type(model).__name__ in {made.__name__ for made in classes}):
        return
    names = sorted(made.__name__ for made in stock)
    raise CheckpointError(Problem("model-of-other-class", "model", found=type(model).__name__, classes=names))


def put_expansion(model: Any, stored: StoredExpansion, name: str) -> Any:
    """Add an expansion to a model in memory.

    A stock model is wrapped, and gets a router if the expansion had one.
    """
    settings = stored.config[CONFIG_KEY]
    (specs,) = settings[EXPANSIONS_KEY]
    if specs["head"].get("new_tokens") and (expansion := getattr(model, "with_new_tokens", "")):
        raise PlanError(Problem("tokens-of-two-expansions", stored.title, expansion=expansion))
    places, is_spread = getattr(model, "hf_device_map", None), is_hooked(model)
    expanded = model if is_expanded(model) else _expanded_copy(model, stored.config)
    # hooks would still call the forward of a module's former class
    unhook(expanded)
    expanded.add_expansion(name, {key: value for key, value in specs.items() if key != "name"})
    _put_tensors(expanded, stored, name, float32=specs["dtype"] == "float32")
    if expanded is not model and ROUTER_KEY in settings:
        expanded.config.scale_surgery[ROUTER_KEY] = dict(settings[ROUTER_KEY])
        expanded.enable_expansion()
    expanded.freeze_base()
    expanded.align()
    if places is not None:
        spread(expanded, places, is_spread=is_spread)
    return expanded


def is_hooked(model: Any) -> bool:
    """Return True if accelerate's hooks move a model's activations between devices."""
    return any(hasattr(module, "_hf_hook") for module in model.modules())


def unhook(model: Any) -> None:
    """Remove accelerate's hooks from a model."""
    from accelerate.hooks import remove_hook_from_module

    for module in model.modules():
        if hasattr(module, "_hf_hook"):
            remove_hook_from_module(module)
            vars(module).pop("forward", None)


def spread(model: Any, places: Mapping[str, Any], *, is_spread: bool) -> None:
    """Dispatch a model to the devices of its base."""
    from accelerate import dispatch_model

    if is_spread:
        skipped = getattr(model, "_skip_keys_device_placement", None)
        dispatch_model(model, dict(places), skip_keys=skipped, force_hooks=True)
    model.hf_device_map = dict(places)


def _expanded_copy(model: Any, config: Mapping[str, Any]) -> Any:
    """Return an expanded model without expansions that shares the weights of a stock model."""
    from transformers import modeling_utils

    quantised = quantised_modules(model)
    for module in quantised.values():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # bitsandbytes would pack the weight for inference, and then cannot propagate gradients
            module.support_avx512bf16_for_cpu = False
    expanded = _on_same_weights(model, quantised)
    for name in COMPILED:
        vars(expanded).pop(name, None)
    for key in ("architectures", "auto_map"):
        setattr(expanded.config, key, config[key])
    expanded.is_base_quantised = bool(quantised)
    if quantised:
        delattr(expanded.config, QUANTISATION_KEY)
        for mark in QUANTISED_MARKS:
            vars(expanded).pop(mark, None)
    unhook(expanded)
    stock, stock_config = type(expanded), type(expanded.config)
    classes = modeling.expanded_classes({"AutoModel": stock}, stock_config)
    expanded.__class__, expanded.config.__class__ = classes["AutoModel"], classes["AutoConfig"]
    # the class defines it; an instance from a file may still have the old value
    vars(expanded.config).pop("model_type", None)
    # transformers lists by class what a forward can record, such as hidden states, when it makes a model
    registry: Any = vars(modeling_utils)["_CAN_RECORD_REGISTRY"]
    dict.update(registry, {str(type(expanded)): expanded._can_record_outputs})
    expanded.config.scale_surgery = {"base": config[CONFIG_KEY][BASE_KEY], "expansions": []}
    expanded.let_paths_through()
    return expanded


def _on_same_weights(model: Any, quantised: Mapping[str, Any]) -> Any:
    """Copy a model with frozen views of its parameters. Quantised modules share weight and state."""
    from torch import nn

    views = {id(tensor): nn.Parameter(tensor.detach(), requires_grad=False) for tensor in model.parameters()}
    shared = [value for module in quantised.values() for value in (module.weight, *_quantisation_state(module))]
    return deepcopy(model, {**views, **{id(value): value for value in shared}})


def _quantisation_state(module: Any) -> list[Any]:
    """Return the attributes of a quantised module that describe its weight. Some change during a run."""
    from torch import nn

    return [value for key, value in vars(module).items() if key not in {*vars(nn.Module()), *HOOKED}]


def _put_tensors(model: Any, stored: StoredExpansion, name: str, *, float32: bool) -> None:
    """Load the tensors of a new expansion in the base's dtype, each on the device of the module that it expands."""
    import torch
    from safetensors import safe_open

    wanted = {key: parameter for key, parameter in model.named_parameters() if expansion_of(key) == name}
    places = reading_of(model).places(renamed(tensor, name) for tensor in stored.tensors)
    names = {tensor: places[renamed(tensor, name)].name for tensor in stored.tensors}
    # a model without a head has no place for the head's expansion
    missing = sorted(wanted.keys() - set(names.values()))
    if missing:
        model.delete_expansion(name)
        raise CheckpointError(Problem("model-of-other-tensors", "model", expansion=stored.title, missing=missing))
    dtype = torch.float32 if float32 else model.dtype
    devices = {key: _device_beside(model, key) for key in wanted}
    for shard in sorted({info.file for info in stored.tensors.values()}):
        with safe_open(stored.path / shard, framework="pt") as file:
            for tensor, key in names.items():
                if key in wanted and stored.tensors[tensor].file == shard:
                    wanted[key].data = file.get_tensor(tensor).to(device=devices[key], dtype=dtype)


def _device_beside(model: Any, tensor: str) -> torch.device:
    """Return the device of the base module that a tensor expands, or of the closest outer module with parameters."""
    path = tensor.partition(INFIX)[0]
    while True:
        inside = model.get_submodule(path).named_parameters(prefix=path)
        base = (parameter for name, parameter in inside if expansion_of(name) is None)
        device: torch.device | None = next((parameter.device for parameter in base), None)
        if device is not None:
            return device
        path = path.rpartition(".")[0]


def _is_inside(module: Any, model: Any) -> bool:
    from torch import nn

    return isinstance(module, nn.Linear) and module is not model.get_output_embeddings()


def _is_packed(module: Any) -> bool:
    return getattr(getattr(module.weight, "quant_state", None), "packing_format_for_cpu", False)
