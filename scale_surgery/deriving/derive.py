"""Facts about a decoder from its config alone: the real model without memory, two tiny twins, and a second or two."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from threading import Lock
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig

from scale_surgery.deriving.bound import alters_logits, keeps_batch, keeps_width
from scale_surgery.deriving.build import (
    build_model,
    build_twin,
    find_place,
    stock_classes,
    usual_torch,
    without_quantisation,
)
from scale_surgery.deriving.facts import CommonFacts, agree_twins, derive_architecture, derive_sizes, watch_twin
from scale_surgery.deriving.prove import (
    Twin,
    checks_of,
    fixed_vocabulary,
    given_by,
    prove,
    refuse_without_states,
)
from scale_surgery.deriving.real_model import RealModel, describe_real, with_few_layers
from scale_surgery.deriving.shrink import shrink
from scale_surgery.deriving.stock_form import inner_key, stock_heads
from scale_surgery.errors import Problem, SurgeryError, UnsupportedFamilyError
from scale_surgery.planning.architecture import Architecture, Sizes
from scale_surgery.running.loading import quiet_transformers
from scale_surgery.running.stored_names import Reading, reading_of

# keys of a config that do not change a model's parts
INDECISIVE = ("dtype", "torch_dtype", "architectures", "transformers_version", "_name_or_path", "auto_map")
_known: dict[str, Derived] = {}
# attention functions of transformers and settings of torch are shared by all threads
one_at_a_time = Lock()


@dataclass(frozen=True)
class Derived:
    """Facts derived from a config.

    Attributes:
        architecture: Facts about the architecture.
        sizes: Sizes of the model.
        twins: Configs of the two twins.
        proof: Checks, sizes of the twins and versions, as plain JSON values.
        reading: How transformers reads its files.
        seconds: How long it took.
    """

    architecture: Architecture
    sizes: Sizes
    twins: tuple[dict[str, Any], dict[str, Any]]
    proof: Mapping[str, Any]
    reading: Reading
    seconds: float


def derive(config: PreTrainedConfig) -> Derived:
    """Derive facts and sizes from a config; results are cached."""
    key = fingerprint_of(config)
    with one_at_a_time:
        if key not in _known:
            _known[key] = _derive(config)
    return _known[key]


def fingerprint_of(config: PreTrainedConfig) -> str:
    """A hash of all that decides the facts; the module of a class from the model's folder is named after its code."""
    plain = {key: value for key, value in config.to_dict().items() if key not in INDECISIVE}
    text = json.dumps(plain, sort_keys=True, default=str)
    return hashlib.sha256(f"{type(config).__module__}.{type(config).__name__} {text}".encode()).hexdigest()


def _derive(config: PreTrainedConfig) -> Derived:
    start = time.perf_counter()
    try:
        with quiet_transformers(), usual_torch():
            real, *twins = find_twins(read_real(config))
            common = agree_twins(*(watch_twin(candidate, real.shown) for candidate in twins))
            twin = twin_of(twins[0], real.twin_kinds, common)
            refuse_without_states(twin)
            architecture, twin = prove(derive_architecture(real, common), twin)
            architecture = replace(
                architecture,
                fixed_vocabulary=fixed_vocabulary(twin),
                alters_logits=alters_logits(twin.stock, architecture.softcap),
                keeps_batch=keeps_batch(twin.stock, architecture.final_norm_path),
                keeps_width=keeps_width(twin.stock, architecture.final_norm_path),
            )
            sizes = derive_sizes(real, architecture)
            fixed, divides = stock_heads(real.model, architecture, sizes)
            architecture = replace(architecture, fixed_heads=fixed, heads_divide_hidden=divides)
            if (key := inner_key(real.config, architecture)) is not None:
                architecture = replace(architecture, keys={**architecture.keys, "inner": key})
    except SurgeryError:
        raise
    # a model that does something unforeseen is not supported; its own error says best what that is
    except Exception as error:
        words = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        raise UnsupportedFamilyError(
            Problem("facts-not-derived", "config.json", model_type=config.model_type, error=words)
        ) from error
    configs = (twins[0].to_dict(), twins[1].to_dict())
    proof = _record(configs, checks_of(twin))
    return Derived(architecture, sizes, configs, proof, reading_of(real.model), time.perf_counter() - start)


def _record(twins: tuple[dict[str, Any], dict[str, Any]], checks: list[str]) -> dict[str, Any]:
    """The proof as a plan and surgery.json record it."""
    numbers = [{key: value for key, value in twin.items() if type(value) is int} for twin in twins]
    # the processor decides which kernels run
    versions = {
        "scale-surgery": version("scale-surgery"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": torch.backends.cpu.get_cpu_capability(),
    }
    return {"checks": checks, "twins": numbers, "versions": versions}


def find_twins(real: RealModel) -> tuple[RealModel, PreTrainedConfig, PreTrainedConfig]:
    """Two twins, and the model with the layers that they show: few where that works, otherwise all the first."""
    if (few := with_few_layers(real)) is not None:
        with suppress(UnsupportedFamilyError):
            return few, *shrink(few)
    return real, *shrink(real)


def twin_of(config: PreTrainedConfig, kinds: tuple[int, ...], common: CommonFacts) -> Twin:
    """The first twin, with the facts in its numbers."""
    real = replace(read_real(config), kinds=kinds, chosen=tuple(range(len(kinds))))
    architecture = derive_architecture(real, common)
    # a model that ran may have cached values
    stock = build_twin(config)
    return Twin(stock, architecture, derive_sizes(real, architecture), kinds, given_by(stock))


def read_real(config: PreTrainedConfig) -> RealModel:
    """Build the real model on the meta device, and find its layers."""
    config = without_quantisation(config)
    if not set(stock_classes(config)) - {"AutoModel"}:
        raise UnsupportedFamilyError(Problem("model-type-not-causal", "config.json", model_type=config.model_type))
    with torch.device("meta"):
        model = build_model(config)
    place = find_place(model)
    if place is None:
        raise UnsupportedFamilyError(Problem("layers-not-found", type(model).__name__))
    return describe_real(config, model, place)
