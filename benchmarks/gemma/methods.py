"""Rows of the table on Gemma 3 270M: what trains, and how."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.biography.methods import with_adapter
from benchmarks.protections import MLP
from scale_surgery import Request, expand, freeze_base

# with it, adapters on the MLPs train about as many parameters as the expansions of the last layers
RANK = 32


@dataclass(frozen=True)
class Method:
    """One way to learn: a name, what makes the model of the base's folder, and the rate in the middle of three."""

    name: str
    make: Callable[[Path], Any]
    rate: float
    rehearses: bool = False


def load(folder: Path) -> Any:
    """Load a model in float32: this is what a processor without instructions for bfloat16 trains."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def adapted(base: Path) -> Any:
    """Load the base with low-rank adapters on its MLPs."""
    from peft import LoraConfig

    torch.manual_seed(0)
    return with_adapter(load(base), LoraConfig(r=RANK, lora_alpha=RANK, target_modules=MLP, task_type="CAUSAL_LM"))


def subspaced(base: Path) -> Any:
    """Load the base with its largest singular directions frozen, of which PEFT chooses half."""
    from peft import OSFConfig

    return with_adapter(load(base), OSFConfig(target_modules=MLP))


def expanded(base: Path, request: Request) -> Any:
    """Expand the base, and load the result."""
    with tempfile.TemporaryDirectory() as folder:
        model = load(expand(base, request, Path(folder) / "expanded", base_weights="link").path)
    freeze_base(model)
    return model


def expansion(**options: Any) -> Callable[[Path], Any]:
    """Describe an expansion of the last layers, by default half of them."""
    return partial(expanded, request=Request(options.pop("layers", "last:9"), **options))


ADAPT: dict[str, Any] = {"variant": "adapt", "collaborate": "both"}
METHODS = (
    Method("full", load, 1e-5),
    Method("full", load, 1e-5, rehearses=True),
    Method("LoRA MLP", adapted, 3e-4),
    Method("LoRA MLP", adapted, 3e-4, rehearses=True),
    Method("OSF", subspaced, 3e-5),
    Method("preserve", expansion(), 1e-3),
    Method("adapt", expansion(**ADAPT), 1e-3, rehearses=True),
    Method("gated", expansion(**ADAPT | {"variant": "gated"}), 1e-3, rehearses=True),
    Method("grow-freeze", expansion(method="grow", layers="all"), 1e-4),
    Method("grow-freeze", expansion(method="grow", layers="all"), 1e-4, rehearses=True),
    Method("grow-train", expansion(method="grow", variant="grow-train", layers="all"), 3e-5),
)
