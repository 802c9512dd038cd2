"""Put an extracted expansion on a model in memory, without a folder of both.

The expanded model shares the weights of the model that it is made from: nothing of the base is copied, and that model
stays as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery import modeling
from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.checkpoint.headers import FLOAT_DTYPES
from scale_surgery.checkpoint.shards import tensor_bytes
from scale_surgery.checkpoint.sources import find_source
from scale_surgery.errors import CheckpointError, PlanError
from scale_surgery.planning.methods import refuse
from scale_surgery.progress import Track, no_track
from scale_surgery.running.loading import auto_class_of, translated
from scale_surgery.surgery.config import written_config
from scale_surgery.surgery.extract_folder import Extract, check_own_files, open_extract
from scale_surgery.surgery.same_base import check_fit, check_sizes, find_differing, hash_base, refuse_differing

if TYPE_CHECKING:
    from torch import Tensor

# what to do with a base that is another
LOAD_IT = "Load that base as it is stored; or give check=False, and no promise is made."


def load_expansion(
    model: Any,
    extract: str | Path,
    *,
    check: bool = True,
    revision: str | None = None,
    extract_revision: str | None = None,
    track: Track = no_track,
    **options: Any,
) -> Any:
    """Put an extracted expansion on its base in memory: the same model as from the folder that `apply` writes.

    Args:
        model: The base: a stock model as `from_pretrained` gives it, which stays usable and shares its weights with
            the result; or a folder or a Hub id.
        extract: A folder that `extract` wrote, or a Hub id.
        check: Whether each base tensor is compared with the hash of the one that the expansion was made on. Without
            it any values are taken, also cast or fine-tuned ones; names and shapes must fit.
        revision: Branch, tag or commit of the base's Hub repository.
        extract_revision: Branch, tag or commit of the extract's.
        track: Makes progress bars.
        options: For `from_pretrained`, where `model` is a folder or a Hub id: dtype, device_map, ...

    Returns:
        The expanded model; its expansion tensors require gradients, its base does not.

    Raises:
        CheckpointError: If this is no extract, or the model is not its base: another class, quantised, cast, trained,
            not in memory as a whole.
        PlanError: If the base is of another architecture, or options are given with a loaded model.
    """
    # the classes then take their code along when the model is saved
    modeling.register()
    found = open_extract(extract, extract_revision)
    refuse(found.manifest.plan.method, "load_expansion", extract)
    if found.manifest.plan.architecture.own_code:
        raise PlanError(
            f"{extract}: was made on a model with code of its own, whose classes its folder has to name. Write the "
            "folder (scale-surgery apply), and load that."
        )
    check_own_files(found, track)
    if isinstance(model, str | Path):
        model, check = _load_base(found, model, revision, options, track, check=check), False
    elif options:
        raise PlanError(f"{', '.join(options)}: says how to load a model, but this one is loaded. Leave it out.")
    expanded_class = _find_class(found, model)
    _check_model(found, model, track, check=check)
    return _expand(found, model, expanded_class)


def _load_base(
    extract: Extract, base: str | Path, revision: str | None, options: Mapping[str, Any], track: Track, *, check: bool
) -> Any:
    """Load a base whose files were compared; then it may be cast."""
    source = find_source(base, revision)
    given = open_checkpoint(source.path)
    check_fit(extract, given, str(base))
    if check:
        differing = find_differing(extract, given, hash_base(given, track))
        refuse_differing(extract, str(base), differing, len(given.tensors), LOAD_IT)
    with translated(str(base), "cannot be loaded", "Check the options, and whether transformers alone loads it."):
        return auto_class_of(given.config).from_pretrained(source.path, **options)


def _find_class(extract: Extract, model: Any) -> Any:
    """The expanded class of a stock model."""
    classes = modeling.model_classes(extract.manifest.plan.architecture)
    stock = {expanded.__bases__[1]: expanded for name, expanded in classes.items() if name != "AutoConfig"}
    if type(model) not in stock:
        names = " or ".join(sorted(known.__name__ for known in stock))
        raise CheckpointError(
            f"model: is a {type(model).__name__}, expected {names} as from_pretrained gives it, or a folder or Hub id."
        )
    return stock[type(model)]


def _check_model(extract: Extract, model: Any, track: Track, *, check: bool) -> None:
    """Refuse a loaded model that is not the base, or that lies where it cannot be shared."""
    if getattr(model.config, "quantization_config", None) is not None:
        raise CheckpointError("model: is quantised, expected the weights that the expansion was made on. Load these.")
    devices = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(devices) > 1 or any(parameter.is_meta for parameter in model.parameters()):
        raise CheckpointError(
            "model: lies on several devices or is offloaded, expected all of it on one. Load it without a device_map "
            "that splits it."
        )
    tensors = dict(model.named_parameters())
    names = _names_in_memory(extract, extract.base_tensors, model)
    shapes = {own: extract.base_tensors[name].shape for name, own in names.items()}
    given = {own: tuple(tensor.shape) for own, tensor in tensors.items()}
    check_sizes(extract, model.config.to_dict(), shapes, given, "model")
    if check:
        _check_values(extract, {name: tensors[own] for name, own in names.items()}, track)


def _names_in_memory(extract: Extract, disk_names: Iterable[str], model: Any) -> dict[str, str]:
    """Names that tensors have in a loaded model, by their names on disk; what the model has no place for is left out.

    A base may have been saved without its head, with names that lack the prefix of the whole model, and may be loaded
    without it.
    """
    prefix = f"{extract.manifest.plan.architecture.base_model}."
    found: dict[str, str] = {}
    present = dict(model.named_parameters())
    for name, own in modeling.names_in_memory(model, disk_names).items():
        forms = [form for form in (own, prefix + own, own.removeprefix(prefix)) if form in present]
        found |= {name: forms[0]} if forms else {}
    return found


def _check_values(extract: Extract, tensors: Mapping[str, Tensor], track: Track) -> None:
    """Compare dtype and bytes of tensors, given by their names on disk."""
    cast = [name for name, tensor in tensors.items() if _stored_dtype(tensor) != extract.base_tensors[name].dtype]
    if cast:
        wanted = extract.base_tensors[cast[0]].dtype
        raise CheckpointError(
            f"model: {len(cast)} of {len(tensors)} tensors were cast, {cast[0]} is {_stored_dtype(tensors[cast[0]])}, "
            f"expected {wanted} as it is stored. Load it without a dtype; or give its folder or Hub id, and the dtype."
        )
    differing = {}
    with track("base tensors", sum(tensor.nbytes for tensor in tensors.values())) as advance:
        for name, tensor in tensors.items():
            if hashlib.sha256(tensor_bytes(tensor)).hexdigest() != extract.manifest.base_tensors[name]:
                differing[name] = "its bytes differ."
            advance(tensor.nbytes)
    refuse_differing(extract, "model", differing, len(tensors), LOAD_IT)


def _stored_dtype(tensor: Tensor) -> str:
    """Dtype of a tensor in safetensors' name."""
    name = str(tensor.dtype).removeprefix("torch.")
    return FLOAT_DTYPES.get(name, name)


def _expand(extract: Extract, model: Any, expanded_class: Any) -> Any:
    """Build the expanded model around the weights of a stock one."""
    import torch

    config = expanded_class.config_class.from_dict(
        written_config(extract.manifest, model.config.to_dict(), str(model.dtype).removeprefix("torch."))
    )
    # transformers' way of giving a dtype and an attention kernel to a model that is not loaded from files
    with torch.device("meta"):
        attention = model.config._attn_implementation
        expanded = expanded_class._from_config(config, dtype=model.dtype, attn_implementation=attention)
    base = model.state_dict()
    own = dict(_own_tensors(extract, expanded, base))
    missing, unexpected = expanded.load_state_dict(base | own, strict=False, assign=True)
    if missing or unexpected:
        found = ", ".join([*missing, *unexpected])
        raise CheckpointError(
            f"model: has other tensors than {extract.name} was made for ({found}). Load it with from_pretrained, and "
            "change no module before the expansion is added."
        )
    _copy_buffers(model, expanded)
    expanded.tie_weights()
    expanded.freeze_base()
    expanded.align_copies()
    if getattr(model, "generation_config", None) is not None:
        expanded.generation_config = deepcopy(model.generation_config)
    return expanded.train(model.training)


def _own_tensors(extract: Extract, expanded: Any, base: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Expansion tensors by their names in memory, each where the stock weight beside it lies, in its dtype."""
    import torch
    from safetensors import safe_open

    names = _names_in_memory(extract, extract.tensors, expanded)
    # what was asked for in float32 stays so, also in a model in half precision
    kept = torch.float32 if extract.manifest.plan.request.dtype == "float32" else None
    for shard in sorted({info.file for info in extract.tensors.values()}):
        with safe_open(extract.path / shard, framework="pt") as file:
            for name in (name for name in names if extract.tensors[name].file == shard):
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
