"""The paths of a composed model by name, and the numbers of the router that mixes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.expansions import ROUTER_KEY, path_names
from scale_surgery.composition.record import Mixing, is_composition, read_composition


@dataclass(frozen=True)
class MixedPaths:
    """The paths of a composed model, and how its router mixes them.

    Attributes:
        names: Of all paths: the base, then each expansion.
        prior: Weight of each at the start of a text.
        switch_rate: Share of its weight that each path gives to the others at every token.
    """

    names: tuple[str, ...]
    prior: tuple[float, ...]
    switch_rate: float
    router = "posterior"

    @property
    def bound(self) -> float:
        """Nats that a text may lose against the best path for it, whatever it says: the largest -ln(prior)."""
        return -math.log(min(self.prior))

    @property
    def bound_per_token(self) -> float:
        """Nats that each further token adds to the bound, -ln(1 - switch rate)."""
        return abs(math.log1p(-self.switch_rate))

    @property
    def is_even(self) -> bool:
        """Whether all paths begin with the same weight."""
        return math.isclose(min(self.prior), max(self.prior))

    @property
    def splits_evenly(self) -> bool:
        """Whether all expansions begin with the same weight."""
        return math.isclose(min(self.prior[1:]), max(self.prior[1:]))

    @property
    def is_default(self) -> bool:
        """Whether the numbers are those that nobody chose."""
        return self.mixing == Mixing()

    @property
    def numbers(self) -> str:
        """Prior and switch rate, in words."""
        named = ", ".join(f"{name} {weight:.3g}" for name, weight in zip(self.names, self.prior, strict=True))
        prior = f"prior {self.prior[0]:.3g} each" if self.is_even else f"prior {named}"
        return f"{prior}, switch rate {self.switch_rate:g}"

    @property
    def description(self) -> str:
        """The router and its numbers in one line."""
        return f"posterior over {len(self.names)} paths, {self.numbers}"

    @property
    def settings(self) -> dict[str, Any]:
        """The router and its numbers as plain JSON values."""
        prior = dict(zip(self.names, self.prior, strict=True))
        return {"router": self.router, "prior": prior, "switch_rate": self.switch_rate}

    @property
    def mixing(self) -> Mixing:
        """What a composed folder says of them."""
        return Mixing(None if self.is_even else self.prior, self.switch_rate)


def read_paths(specs: Mapping[str, Any]) -> MixedPaths | None:
    """The paths of a model whose posterior router mixes named expansions, by its config.json; None where it is none.

    Args:
        specs: What the key `scale_surgery` says.
    """
    names, router = path_names(specs), specs.get(ROUTER_KEY)
    if not names or not router or router["router"] != MixedPaths.router:
        return None
    return MixedPaths(names, tuple(map(float, router["prior"])), float(router["switch_rate"]))


def base_name_in(path: Path) -> str | None:
    """What the base of a composed folder is called, as composed.json says; None where there is none."""
    return read_composition(path)[1].base_name if is_composition(path) else None
