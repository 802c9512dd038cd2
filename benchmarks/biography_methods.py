"""The methods that benchmarks/biography.py compares: ways to train a base model on new text, as data.

Every method but full fine-tuning trains about as many parameters as freezing the lower half of the shipped model
does, 295,552. What was chosen for that: the rank of the adapters, and the inner width of the expansions. A method that
is added here needs a colour in biography_figures.py, and nothing else.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM

from scale_surgery import Request, expand

FROZEN_LAYERS = 2
RANK = 36


@dataclass(frozen=True)
class Method:
    """One way to learn.

    Attributes:
        name: What it is called in records, table and figures.
        make: Makes the model from a base folder and a seed; what requires a gradient is what trains.
        rate: Learning rate that the sweep begins around.
    """

    name: str
    make: Callable[[Path, int], Any]
    rate: float


def whole(base: Path, seed: int) -> Any:
    """Load the base model, all of it trainable."""
    return AutoModelForCausalLM.from_pretrained(base)


def frozen(base: Path, seed: int, *, layers: int) -> Any:
    """Load the base model with its embedding, and the head where it is tied, and its lowest layers frozen."""
    model = whole(base, seed)
    for module in (model.model.embed_tokens, *model.model.layers[:layers]):
        module.requires_grad_(False)
    return model


def adapted(base: Path, seed: int, *, start: Literal["pissa", True], rank: int) -> Any:
    """Load the base model with low-rank adapters on every linear of attention and MLP."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", init_lora_weights=start)
    with warnings.catch_warnings():
        # peft asks for a property that transformers has renamed
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
        return get_peft_model(whole(base, seed), config)


def expanded(base: Path, seed: int, *, request: Request) -> Any:
    """Expand the base model, and load the result."""
    with tempfile.TemporaryDirectory() as folder:
        expand(base, replace(request, seed=seed), Path(folder) / "expanded")
        return whole(Path(folder) / "expanded", seed)


def scale(name: str, inner_width: int, rate: float = 3e-3, **options: Any) -> Method:
    """Describe an expansion of all layers."""
    return Method(name, partial(expanded, request=Request("all", up_inner_width=inner_width, **options)), rate)


def adapt(collaborate: Literal["attn", "both"], lowest: int, inner_width: int) -> Method:
    """Describe SCALE-Adapt with W12 in the layers from `lowest` on, so that L_fp is `lowest`."""
    options = {"variant": "adapt", "collaborate": collaborate, "collaborative_layers": f"{lowest}-3"}
    return scale(f"adapt {collaborate} {lowest}", inner_width, **options)


PRESERVE_WIDTH = 88
PRESERVE = scale("preserve", PRESERVE_WIDTH, rate=1e-2)

METHODS = (
    Method("full", whole, 1e-3),
    Method("freeze", partial(frozen, layers=FROZEN_LAYERS), 1e-3),
    Method("LoRA", partial(adapted, start=True, rank=RANK), 3e-3),
    Method("PiSSA", partial(adapted, start="pissa", rank=RANK), 1e-3),
    PRESERVE,
    adapt("attn", 0, 56),
    adapt("attn", 2, 72),
    adapt("attn", 3, 80),
    adapt("both", 0, 8),
    adapt("both", 2, 40),
    adapt("both", 3, 64),
)

# the paper's four pairs (W21, W22); the last is the default, whose runs are those of PRESERVE
INITS = {
    "0, random": scale("preserve 0, random", PRESERVE_WIDTH, init_w21="zero", init_w22="random"),
    "random, 0": scale("preserve random, 0", PRESERVE_WIDTH, init_w21="random", init_w22="zero"),
    "0, svd": scale("preserve 0, svd", PRESERVE_WIDTH, init_w21="zero", init_w22="svd"),
    "svd, 0": PRESERVE,
}
