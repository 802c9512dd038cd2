"""Rows of the table on Gemma 3 270M: what trains, and how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.biography.methods import expanded, whole
from benchmarks.protections import on_mlps, subspaced
from scale_surgery import Request

# with it, adapters on the MLPs train about as many parameters as the expansions of the last layers
RANK = 32


@dataclass(frozen=True)
class Method:
    """One way to learn: a name, what makes the model of a base and a seed, and the rate in the middle of three."""

    name: str
    make: Callable[..., Any]
    rate: float
    rehearses: bool = False


def expansion(**options: Any) -> Callable[..., Any]:
    """Describe an expansion of the last layers, by default half of them."""
    return partial(expanded, request=Request(options.pop("layers", "last:9"), **options))


ADAPT: dict[str, Any] = {"variant": "adapt", "collaborate": "both"}
LORA = partial(on_mlps, rank=RANK)
# the rows of the claim first: all with own samples
METHODS = (
    Method("full", whole, 1e-5, rehearses=True),
    Method("grow-freeze", expansion(method="grow", layers="all"), 1e-4, rehearses=True),
    Method("adapt", expansion(**ADAPT), 1e-3, rehearses=True),
    Method("LoRA MLP", LORA, 3e-4, rehearses=True),
    Method("gated", expansion(**ADAPT | {"variant": "gated"}), 1e-3, rehearses=True),
    Method("full", whole, 1e-5),
    Method("LoRA MLP", LORA, 3e-4),
    Method("OSF", subspaced, 3e-5),
    Method("preserve", expansion(), 1e-3),
    Method("grow-freeze", expansion(method="grow", layers="all"), 1e-4),
    Method("grow-train", expansion(method="grow", variant="grow-train", layers="all"), 3e-5),
)
