"""Add an expansion to a model in memory: a stock one, which is wrapped, or one that has expansions already.

The wrapped model shares the weights of the stock one, which stays as it is. A quantised linear stays the quantiser's
module. Where the base is spread over devices, so is the copy, and a new tensor lies on the device of the module beside
which it stands.
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
from scale_surgery.running.stored_names import reading_of

if TYPE_CHECKING:
    import torch

# quantisers whose modules share a weight by sharing the parameter
QUANTISERS = ("bitsandbytes", "torchao")
QUANTISATION_KEY = "quantization_config"
# attributes by which transformers saves a quantised model in its own way and refuses to train it
QUANTISED_MARKS = (
    *("hf_quantizer", "is_loaded_in_8bit", "is_loaded_in_4bit"),
    *("is_8bit_serializable", "is_4bit_serializable", "is_quantized", "quantization_method"),
)
# attributes that accelerate sets
HOOKED = ("forward", "_old_forward", "_hf_hook")


@dataclass(frozen=True)
class StoredExpansion:
    """An expansion in files: title and path of its folder, its tensors, and config.json of a model with it alone."""

    title: str
    path: Path
    tensors: Mapping[str, TensorInfo]
    config: Mapping[str, Any]


def is_expanded(model: Any) -> bool:
    """Whether a model is of an expanded class, from this package or from the code in its folder."""
    return hasattr(model, "add_expansion")


def quantiser_of(model: Any) -> str | None:
    """Name of the quantiser of a loaded model, as transformers has it; None where it is not quantised."""
    config = getattr(model.config, QUANTISATION_KEY, None)
    if config is None:
        return None
    method = config.get("quant_method") if isinstance(config, Mapping) else config.quant_method
    return str(getattr(method, "value", method))


def quantised_modules(model: Any) -> dict[str, Any]:
    """The modules of a loaded model whose weight is quantised, by their names."""
    from torch import nn

    if quantiser_of(model) is None and not getattr(model, "is_base_quantised", False):
        return {}
    return {
        name: module
        for name, module in model.named_modules()
        if type(module._parameters.get("weight")) not in (nn.Parameter, type(None))
    }


def quantised_shape(module: Any) -> tuple[int, int]:
    """Shape of a weight before it was quantised: four bits are packed into another."""
    from transformers.pytorch_utils import Conv1D

    shape = module.out_features, module.in_features
    return (shape[1], shape[0]) if getattr(module, "source_cls", None) is Conv1D else shape


def check_shareable(model: Any) -> None:
    """Refuse a loaded model whose weights a wrapped model cannot share."""
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
    """Refuse a model of another class than the stock ones of an architecture, and those that expand them."""
    classes = [made for name, made in modeling.model_classes(architecture).items() if name != "AutoConfig"]
    stock = {made.__bases__[1] for made in classes}
    # code in a model's folder defines a class of the same name
    if type(model) in stock or (is_expanded(model) and type(model).__name__ in {made.__name__ for made in classes}):
        return
    names = sorted(made.__name__ for made in stock)
    raise CheckpointError(Problem("model-of-other-class", "model", found=type(model).__name__, classes=names))


def put_expansion(model: Any, stored: StoredExpansion, name: str) -> Any:
    """Add an expansion to a model in memory; a stock model is wrapped, and routed where the expansion was."""
    settings = stored.config[CONFIG_KEY]
    (specs,) = settings[EXPANSIONS_KEY]
    if specs["head"].get("new_tokens") and (expansion := getattr(model, "with_new_tokens", "")):
        raise PlanError(Problem("tokens-of-two-expansions", stored.title, expansion=expansion))
    places, is_spread = getattr(model, "hf_device_map", None), is_hooked(model)
    expanded = model if is_expanded(model) else _expanded_copy(model, stored.config)
    # hooks would go on calling the forward of a module's former class
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
    """Whether hooks of accelerate move a model's activations between devices."""
    return any(hasattr(module, "_hf_hook") for module in model.modules())


def unhook(model: Any) -> None:
    """Take the hooks of accelerate off a model."""
    from accelerate.hooks import remove_hook_from_module

    for module in model.modules():
        if hasattr(module, "_hf_hook"):
            remove_hook_from_module(module)
            vars(module).pop("forward", None)


def spread(model: Any, places: Mapping[str, Any], *, is_spread: bool) -> None:
    """Let a model compute where its base does."""
    from accelerate import dispatch_model

    if is_spread:
        skipped = getattr(model, "_skip_keys_device_placement", None)
        dispatch_model(model, dict(places), skip_keys=skipped, force_hooks=True)
    model.hf_device_map = dict(places)


def _expanded_copy(model: Any, config: Mapping[str, Any]) -> Any:
    """An expanded model without an expansion yet, on the weights of a stock one."""
    quantised = quantised_modules(model)
    for module in quantised.values():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # bitsandbytes would pack the weight for inference, and then lets no gradient through
            module.support_avx512bf16_for_cpu = False
    expanded = _on_same_weights(model, quantised)
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
    # the class has it; an instance that was read from a file may have the old one
    vars(expanded.config).pop("model_type", None)
    expanded.config.scale_surgery = {"base": config[CONFIG_KEY][BASE_KEY], "expansions": []}
    expanded.let_paths_through()
    return expanded


def _on_same_weights(model: Any, quantised: Mapping[str, Any]) -> Any:
    """A copy whose parameters are frozen views of the model's; quantised modules share weight and state."""
    from torch import nn

    views = {id(tensor): nn.Parameter(tensor.detach(), requires_grad=False) for tensor in model.parameters()}
    shared = [value for module in quantised.values() for value in (module.weight, *_quantisation_state(module))]
    return deepcopy(model, {**views, **{id(value): value for value in shared}})


def _quantisation_state(module: Any) -> list[Any]:
    """Attributes of a quantised module that describe its weight; some change as the module runs."""
    from torch import nn

    return [value for key, value in vars(module).items() if key not in {*vars(nn.Module()), *HOOKED}]


def _put_tensors(model: Any, stored: StoredExpansion, name: str, *, float32: bool) -> None:
    """Load the tensors of a new expansion, each on the device of the module beside it, in the base's dtype."""
    import torch
    from safetensors import safe_open

    wanted = {key: parameter for key, parameter in model.named_parameters() if expansion_of(key) == name}
    places = reading_of(model).places(renamed(tensor, name) for tensor in stored.tensors)
    names = {tensor: places[renamed(tensor, name)].name for tensor in stored.tensors}
    # a model without a head has no place for the tensors beside a head
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
    """Device of the base module beside which a tensor of an expansion stands, or of the next module around it."""
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
