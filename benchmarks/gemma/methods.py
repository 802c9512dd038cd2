"""Rows of the table on Gemma 3 270M: what trains, and how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.biography.methods import expanded, whole
from benchmarks.protections import on_mlps, subspaced
from scale_surgery import Request
from scale_surgery.modeling.expanded_routers import PosteriorRouter, Router

# with it, adapters on the MLPs train about as many parameters as the expansions of the last layers
RANK = 32


@dataclass(frozen=True)
class Method:
    """One way to learn.

    Attributes:
        name: What it is called in records and tables.
        make: Makes the model of a base folder and a seed.
        rates: Learning rates to run, the first one first.
        rehearses: Whether own samples of the base stand beside what is learned.
        is_routed: Whether it is also scored with its router, which is off while it trains.
    """

    name: str
    make: Callable[..., Any]
    rates: tuple[float, ...]
    rehearses: bool = False
    is_routed: bool = False


def expansion(routing: Router | None = None, **options: Any) -> Callable[..., Any]:
    """Describe an expansion of the last layers, by default half of them."""
    return partial(expanded, request=Request(options.pop("layers", "last:9"), **options), routing=routing)


ADAPT: dict[str, Any] = {"variant": "adapt", "collaborate": "both"}
GROW: dict[str, Any] = {"method": "grow", "layers": "all"}
LORA = partial(on_mlps, rank=RANK)
# the rows of the claim first
METHODS = (
    Method("full", whole, (1e-4, 3e-5, 1e-5), rehearses=True),
    Method("grow-freeze", expansion(**GROW), (3e-4, 1e-4, 3e-5), rehearses=True),
    Method("adapt", expansion(**ADAPT), (1e-3, 3e-4, 1e-4), rehearses=True),
    Method("adapt", expansion(PosteriorRouter(), **ADAPT), (1e-3,), is_routed=True),
    Method("LoRA MLP", LORA, (1e-3, 3e-3), rehearses=True),
    Method("full", whole, (1e-4,)),
    Method("grow-freeze", expansion(**GROW), (3e-4,)),
    Method("preserve", expansion(), (3e-3,), rehearses=True),
    Method("gated", expansion(**ADAPT | {"variant": "gated"}), (3e-4,), rehearses=True),
    Method("LoRA MLP", LORA, (1e-3,)),
    Method("OSF", subspaced, (1e-4,)),
    Method("grow-train", expansion(**GROW, variant="grow-train"), (1e-4,)),
)
