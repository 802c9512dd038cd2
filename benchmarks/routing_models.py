"""The models of the routing benchmark: a random Llama, its expansions, and their routed forms."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from benchmarks import make_checkpoint
from benchmarks.device import Place
from benchmarks.make_checkpoint import Shape
from scale_surgery import Request, expand, register
from scale_surgery.modeling.expanded_routers import CosineRouter, PosteriorRouter
from scale_surgery.surgery.route import route_export

ROUTINGS = {
    "posterior": PosteriorRouter(),
    "cosine": CosineRouter(),
    "strict": CosineRouter(strict=True),
}
# spread of what starts at zero and would leave both paths equal
SPREAD = make_checkpoint.SPREAD


@dataclass(frozen=True)
class Settings(Place):
    """What is measured, and on what."""

    shape: str
    length: int
    rounds: int
    is_quick: bool = False


@dataclass(frozen=True)
class Variant:
    """A model to measure.

    Attributes:
        name: Of its folder.
        unrouted: Name of the same model without its router; its own where it has none.
        router: One of ROUTINGS, or None.
        formula: Cost of a forward by the design's formula, as a multiple of that of the unrouted model.
    """

    name: str
    unrouted: str
    router: str | None = None
    formula: float = 1.0


def formula(layers: int, preserved: int) -> float:
    """Cost of a routed forward as the design has it."""
    return 1 + (layers - preserved) / layers


def make_models(folder: Path, shape: Shape, place: Place, depths: Iterable[int]) -> list[Variant]:
    """Write the base, its expansions and their routed forms into a folder; each L_fp of `depths`, and preserve."""
    dtype = getattr(torch, place.dtype)
    make_checkpoint.make_checkpoint(folder / "base", shape, dtype=dtype, device=place.device)
    preserve = Request("all", init_w21="random")
    variants = [Variant("base", "base")]
    for depth in depths:
        collaborative = f"{depth}-{shape.layers - 1}"
        adapt = replace(preserve, variant="adapt", collaborative_layers=collaborative, collaborate="attn")
        variants += make_routed(folder, f"L_fp {depth}", adapt, ROUTINGS, formula(shape.layers, depth))
    return variants + make_routed(folder, "preserve", preserve, ["posterior"], 1.0)


def make_routed(folder: Path, name: str, request: Request, routers: Iterable[str], cost: float) -> list[Variant]:
    """Write one expansion and its routed forms; links, so that all models share the pages of the base's files."""
    expand(folder / "base", request, folder / name, base_weights="link")
    variants = [Variant(name, name)]
    for router in routers:
        variants.append(Variant(f"{name} {router}", name, router, cost))
        route_export(folder / name, folder / variants[-1].name, ROUTINGS[router], base_weights="link")
    return variants


def load(folder: Path, variant: Variant, device: str) -> Any:
    """Load a model, ready to be called; what starts at zero is random, so that its paths differ."""
    register()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder / variant.name)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith((".w12", ".up_weight")):
            random = torch.randn(parameter.shape, generator=generator) * SPREAD
            parameter.data = random.to(parameter.dtype)
    return model.to(device)


def random_tokens(model: Any, batch: int, length: int) -> torch.Tensor:
    """Token ids that are the same for every model of a vocabulary."""
    generator = torch.Generator().manual_seed(0)
    # the first two begin and end a text
    return torch.randint(2, model.config.vocab_size, (batch, length), generator=generator).to(model.device)
