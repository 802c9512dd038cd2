"""Load a model for training, and refuse a model that could not learn."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from scale_surgery.checkpoint.expansions import ROUTER_KEY
from scale_surgery.checkpoint.hashes import hash_tensors
from scale_surgery.checkpoint.numbering import CONFIG_KEY
from scale_surgery.errors import Problem, TrainingError
from scale_surgery.folder.config import written_config
from scale_surgery.folder.folder import Folder
from scale_surgery.folder.parts import link_base
from scale_surgery.planning.methods import refuse
from scale_surgery.planning.plan import Plan
from scale_surgery.running.freeze import expansion_parts, freeze_base, train_in_float32
from scale_surgery.running.in_memory import InMemory
from scale_surgery.running.loading import auto_class_of, model_class, quiet_transformers, translated
from scale_surgery.running.options import RunOptions
from scale_surgery.running.wrap_model import StoredExpansion, put_expansion
from scale_surgery.training.arguments import choose_precision, is_cpu
from scale_surgery.training.settings import GROUPS, Quantisation, TrainingSettings, groups_problem


def load_to_train(folder: Folder, settings: TrainingSettings, run: RunOptions) -> Any:
    """Load a model for training: trained parameters in float32, all others frozen in the dtype of the base.

    That is their stored dtype, or float32 if `choose_precision` widens it.
    """
    kind = settings.base_quantization
    widens = choose_precision(folder.running_dtype, settings, run).widens
    model = _load(folder, run, widens=widens) if kind is None else _load_quantised(folder, kind, run)
    others = [name for name in getattr(model, "expansions", ()) if name not in folder.manifest.expansions]
    for name in others:
        # other expansions do not train, and would take memory
        model.delete_expansion(name)
    if others:
        model.set_expansion(*folder.manifest.expansions)
    freeze_base(model)
    train_in_float32(model)
    for part in expansion_parts(model):
        part.parameter.requires_grad_(part.group in settings.groups)
    if _is_trapped(model):
        raise TrainingError(Problem("copies-stay-equal", folder.path))
    if ROUTER_KEY in folder.config[CONFIG_KEY]:
        model.enable_routing(settings.routed)
    if settings.routed and _is_base_everywhere(model):
        raise TrainingError(Problem("router-gives-base", folder.path))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        present = {part.group for part in expansion_parts(model)}
        raise TrainingError(groups_problem(folder.path, settings, [group for group in GROUPS if group in present]))
    return model


def _load(folder: Folder, run: RunOptions, *, widens: bool) -> Any:
    options: dict[str, Any] = {"dtype": "float32"} if widens else {}
    with quiet_transformers(), translated("model-not-loaded", folder.path.name):
        make = model_class(folder, run).from_pretrained
        return make(folder.path, trust_remote_code=run.trust_remote_code, **options)


def check_quantisation(path: str | Path, plan: Plan, kind: Quantisation | None, run: RunOptions) -> None:
    """Refuse a quantised base if the expansion, the launch or the installation does not support it."""
    from accelerate.utils import parse_flag_from_env

    if kind is None:
        return
    if parse_flag_from_env("ACCELERATE_USE_FSDP"):
        raise TrainingError(Problem("quantisation-with-fsdp", "--base-quantization", kind=kind))
    refuse(plan.method, "quantised", path)
    if run.trust_remote_code or plan.architecture.own_code:
        raise TrainingError(Problem("quantisation-with-own-code", "--base-quantization", kind=kind))
    if find_spec("bitsandbytes") is None:
        raise TrainingError(Problem("quantisation-without-package", "--base-quantization", kind=kind))


def _load_quantised(folder: Folder, kind: Quantisation, run: RunOptions) -> Any:
    """Load the base of a folder quantised, and add the expansion to it."""
    from accelerate import PartialState

    plan = folder.manifest.plan
    with TemporaryDirectory() as scratch:
        link_base(folder, Path(scratch))
        with quiet_transformers(), translated("model-not-loaded", folder.path.name):
            base = auto_class_of(folder.config).from_pretrained(
                scratch,
                quantization_config=_quantisation(kind, folder.running_dtype),
                device_map={"": PartialState(cpu=is_cpu(run)).device},
            )
    config = written_config(folder.manifest, base.config.to_dict())
    tensors = {tensor.name: folder.tensors[tensor.name] for tensor in plan.tensors}
    return put_expansion(base, StoredExpansion(folder.path.name, folder.path, tensors, config), plan.request.name)


def _quantisation(kind: Quantisation, dtype: str) -> Any:
    """Return the settings of the quantiser; 4-bit products are computed in the dtype of the base."""
    import torch
    from transformers import BitsAndBytesConfig

    make: Any = BitsAndBytesConfig
    if kind == "int8":
        return make(load_in_8bit=True)
    computed = torch.bfloat16 if dtype == "BF16" else torch.float32
    return make(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=computed)


def check_reach(stored: InMemory, folder: Folder) -> None:
    """Refuse to train copies of layers while their zero output tensors stay frozen: nothing would reach the output."""
    manifest = folder.manifest
    if manifest.plan.numbering is None:
        return
    mute = [tensor.name for tensor in manifest.plan.guards]
    hashes = hash_tensors(folder, mute)
    if any(hashes[name] != manifest.expansion_tensors[name] for name in mute):
        return
    parts = {part.name: part for part in expansion_parts(stored.model)}
    ways_out = [parts[stored.places[manifest.plan.stored_name(name)].name] for name in mute]
    if not any(part.parameter.requires_grad for part in ways_out):
        needed = sorted({part.group for part in ways_out})
        raise TrainingError(Problem("copies-stay-silent", folder.path, groups=needed))


def _is_trapped(model: Any) -> bool:
    """Return True if two equal copies of an MLP, the base's and the new one, would train identically."""
    from torch import equal, nn

    def is_half(down: Any) -> bool:
        weight = down.stock.weight if isinstance(down.stock, nn.Linear) else down.stock.weight.t()
        return down.w12.shape == weight.shape and equal(down.w12, weight.to(down.w12.dtype) * down.share)

    grown = [module for module in model.modules() if getattr(module, "w11", None) is not None]
    halves = [module for module in model.modules() if hasattr(module, "share") and module.w12 is not None]
    are_alike = all(up.w11.requires_grad == up.w21.requires_grad and equal(up.w11, up.w21) for up in grown)
    return bool(grown) and are_alike and all(is_half(half) and not half.w12.requires_grad for half in halves)


def _is_base_everywhere(model: Any) -> bool:
    """Return True if a strict cosine router gives the base's logits everywhere, because all W12 are zero."""
    router = model.config.scale_surgery[ROUTER_KEY]
    blocks = (part.parameter for part in expansion_parts(model) if part.group == "w12")
    return router["router"] == "cosine" and router["strict"] and not any(block.count_nonzero() for block in blocks)
