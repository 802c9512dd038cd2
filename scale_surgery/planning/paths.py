"""The paths of a model with several expansions by name, and the numbers of the router that mixes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scale_surgery.checkpoint.expansions import BASE_NAME, specs_of_expansions
from scale_surgery.planning.routing_specs import Routing, read_routing, routing_of_weights


@dataclass(frozen=True)
class MixedPaths:
    """The paths of a model with several expansions, and how its router mixes them.

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
        return self.routing == Routing()

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
    def routing(self) -> Routing:
        """What surgery.json says of them."""
        return routing_of_weights(Routing(switch_rate=self.switch_rate), self.prior)


def paths_of(routing: Routing, names: Mapping[str, Any] | tuple[str, ...]) -> MixedPaths:
    """How a router mixes the base and expansions of these names."""
    return MixedPaths((BASE_NAME, *names), routing.weights(len(names)), routing.switch_rate)


def read_paths(specs: Mapping[str, Any]) -> MixedPaths | None:
    """The paths of a model, by the key `scale_surgery` of its config.json; None where it has but one expansion."""
    names = tuple(own["name"] for own in specs_of_expansions(specs) if "name" in own)
    routing = read_routing(specs) if len(names) > 1 else None
    return None if routing is None else paths_of(routing, names)
