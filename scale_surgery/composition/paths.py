"""The paths of a composed model by name, and the numbers of the router that mixes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scale_surgery.composition.record import Mixing, is_composition, read_composition

BASE = "base"


@dataclass(frozen=True)
class MixedPaths:
    """The paths of a composed model, and how its router mixes them.

    Attributes:
        names: Of all paths: the base, then each expansion.
        prior: Weight of each at the start of a text.
        switch_rate: Share of its weight that each path gives to the others at every token.
        prune: Weight below which a path is left out while tokens are read one by one; 0 leaves none out.
        lag: Tokens after which paths that are out read what they have not.
    """

    names: tuple[str, ...]
    prior: tuple[float, ...]
    switch_rate: float
    prune: float = 0.0
    lag: int = Mixing.lag
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
        return self.mixing == Mixing(prune=self.prune, lag=self.lag)

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
        return Mixing(None if self.is_even else self.prior, self.switch_rate, self.prune, self.lag)


def read_paths(specs: Mapping[str, Any]) -> MixedPaths | None:
    """The paths of a composed model, by what its config.json says; None where it is none."""
    if "expansions" not in specs or "mixing" not in specs:
        return None
    names, mixing = (BASE, *specs["expansions"]), specs["mixing"]
    prior = mixing["prior"] or [1 / len(names)] * len(names)
    own = Mixing(**mixing)
    return MixedPaths(names, tuple(map(float, prior)), float(own.switch_rate), own.prune, own.lag)


def base_name_in(path: Path) -> str | None:
    """What the base of a composed folder is called, as composed.json says; None where there is none."""
    return read_composition(path)[1].base_name if is_composition(path) else None
