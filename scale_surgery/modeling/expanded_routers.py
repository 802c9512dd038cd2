"""Routers weigh the paths of a model, token by token.

    posterior   log Σ_k w_k p_k, where w_k is the posterior probability that path k explains the tokens read so far:

                    v_k(t) ∝ w_k(t) p_k(y_t)        w_k(t+1) = (1 - r) v_k(t) + (r / K) Σ_{j≠k} v_j(t)

                Bayes' mixture of K + 1 paths with fixed share r (Herbster and Warmuth 1998). With r = 0 no text loses
                more than -ln of a path's prior against that path.
    cosine      of two paths, Z_p and Z_a being the logits of their base streams and Z_up what their up streams add:
                if cos(Z_p, Z_a) > threshold: (Z_p + Z_a) / 2 + Z_up_p, else Z_a + Z_up_a (SCALE, arXiv 2511.03270, eq.
                5); strict: Z_p alone instead of the first

A router is its numbers and a method `weights`; ROUTERS lists all of them. This file is read without torch, for the
numbers alone.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

    from .expanded_paths import Path
    from .expanded_routing import Evidence, Features, WeighedPath


class Router:
    """Base class of routers: a router makes one set of logits of several paths.

    A router is a frozen dataclass: its fields are `router`, its name, and its numbers, each with a default. It has to
    have `weights`; `problems` checks its numbers.

    Attributes:
        router: Its name.
        reads_tokens: Whether it weighs paths by how they predicted the tokens read; it then has a state in the cache.
        is_hard: Whether the path of the largest weight gets all of it; its logits then come out as they are.
        bound: Nats that a text may lose, whatever it says: against the base, or of many paths against the best for it;
            None where nothing bounds them.
        bound_per_token: Nats that each further token adds to the bound.
    """

    router: str
    reads_tokens: ClassVar[bool] = True
    is_hard: ClassVar[bool] = False
    bound: float | None = None
    bound_per_token: float | None = None

    def for_expansions(self, expansions: int) -> Router:
        """This router for so many expansions, its missing numbers filled in."""
        return self

    def without_prior(self) -> Router:
        """This router without numbers of single paths."""
        return self

    def problems(self, expansions: int) -> list[str]:
        """What is wrong with its numbers for so many expansions."""
        return []

    def paths(self, expansions: tuple[str, ...]) -> tuple[Path, ...]:
        """The paths that run."""
        from .expanded_paths import BASE, Path

        return (BASE, *(Path(name) for name in expansions))

    def sides(self, features: Features) -> tuple[list[WeighedPath], Tensor | None]:
        """The weighed paths, and what the router reads in their logits (b, t), or None."""
        return features.sides(), None

    def read_logits(self, features: Features) -> tuple[list[Tensor], Tensor | None]:
        """Logits of each weighed path (b, t, v), and what the router reads in them (b, t), or None."""
        sides, observed = self.sides(features)
        return [features.whole(side) for side in sides], observed

    def weights(self, evidence: Evidence) -> Tensor:
        """Log weights of the paths after each token (b, t, k), float32.

        `evidence` is one of `expanded_routing`: log-likelihoods of the tokens on each path, restarts, and more. Weights
        after the last token are all that a router remembers: the next call reads them in `evidence.before`. So weights
        after a token are made of that token and of the weights before it; at a restart there are none before.
        """
        raise NotImplementedError

    @property
    def settings(self) -> dict[str, Any]:
        """Its name and its numbers, as config.json keeps them."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


@dataclass(frozen=True)
class PosteriorRouter(Router):
    """The Bayes mixture of all paths; see the module."""

    router: str = field(default="posterior", init=False)
    # weight of the base and of each expansion at the start of a text; they sum to 1. One number is the base's, and the
    # expansions have the rest alike; None: all paths are alike.
    prior: tuple[float, ...] | float | None = None
    switch_rate: float = 0.01  # share of its weight that each path gives to the others at every token

    def for_expansions(self, expansions: int) -> PosteriorRouter:
        if self.prior is None:
            return replace(self, prior=(1 / (1 + expansions),) * (1 + expansions))
        if isinstance(self.prior, tuple):
            return self
        return replace(self, prior=(self.prior, *((1 - self.prior) / expansions,) * expansions))

    def without_prior(self) -> PosteriorRouter:
        return replace(self, prior=None)

    def problems(self, expansions: int) -> list[str]:
        problems = []
        is_whole = len(self.prior) == 1 + expansions and abs(sum(self.prior) - 1) < 1e-6
        if not is_whole or not all(weight > 0 for weight in self.prior):
            problems.append(
                f"prior: is {list(self.prior)}, expected {1 + expansions} positive weights of sum 1, the base's first."
            )
        if not 0 <= self.switch_rate < 1:
            problems.append(f"switch_rate: is {self.switch_rate!r}, expected a share of at least 0 and less than 1.")
        return problems

    @property
    def bound(self) -> float | None:
        if not isinstance(self.prior, tuple):
            return None
        return -math.log(self.prior[0] if len(self.prior) == 2 else min(self.prior))

    @property
    def bound_per_token(self) -> float:
        return abs(math.log1p(-self.switch_rate))

    def weights(self, evidence: Evidence) -> Tensor:
        from .expanded_routing import posterior_weights

        log_likelihoods = evidence.log_likelihoods
        return posterior_weights(evidence.before, log_likelihoods, evidence.restarts, self.prior, self.switch_rate)


@dataclass(frozen=True)
class CosineRouter(Router):
    """The paper's router, on the base part of the logits; see the module."""

    reads_tokens: ClassVar[bool] = False
    is_hard: ClassVar[bool] = True
    router: str = field(default="cosine", init=False)
    threshold: float = 0.5  # cosine above which a token takes the preserve path
    strict: bool = False  # whether that is the base model alone, without an up stream of its own

    def paths(self, expansions: tuple[str, ...]) -> tuple[Path, ...]:
        from .expanded_paths import BASE, Path

        return tuple(path for name in expansions for path in (BASE if self.strict else Path(name, False), Path(name)))

    def problems(self, expansions: int) -> list[str]:
        problems = [] if expansions == 1 else [f"cosine: decides between the base and one expansion, not {expansions}."]
        if not -1 <= self.threshold <= 1:
            problems.append(f"threshold: is {self.threshold!r}, expected a cosine, from -1 to 1.")
        if not isinstance(self.strict, bool):
            problems.append(f"strict: is {self.strict!r}, expected True or False.")
        return problems

    def sides(self, features: Features) -> tuple[list[WeighedPath], Tensor | None]:
        from .expanded_routing import row_cosines

        bases = features.base_logits()
        z_p, z_a = bases[0], bases[-1]
        observed = row_cosines(z_p.detach(), z_a.detach())
        if not self.strict and z_p is not z_a:
            # logits are large: where nothing trains, the mean is made in place
            bases = [(z_p + z_a) / 2, z_a.clone()] if z_a.requires_grad else [z_p.add_(z_a).div_(2), z_a]
        return features.sides(bases), observed

    def weights(self, evidence: Evidence) -> Tensor:
        import torch

        is_adapt = evidence.observed <= self.threshold
        return torch.stack((~is_adapt, is_adapt), -1).float().log()


ROUTERS: dict[str, type] = {kind.router: kind for kind in (PosteriorRouter, CosineRouter)}


def make_router(settings: dict[str, Any], expansions: int, source: str = "") -> Router:
    """Make the router that settings name, the posterior one where they name none.

    Args:
        settings: `router`, and its numbers.
        expansions: How many expansions it weighs beside the base.
        source: Where the settings are from, if not from a call.

    Raises:
        ValueError: If there is no such router, or one of its numbers is out of range.
    """
    try:
        numbers = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
        router = ROUTERS[numbers.pop("router", "posterior")](**numbers).for_expansions(expansions)
        problems = router.problems(expansions)
    except (KeyError, TypeError, ArithmeticError) as error:
        advice = "Was it made by another release, or by hand?" if source else "Leave out what it does not have."
        raise ValueError(
            f"{source or 'router:'} is {settings}, expected one of {', '.join(ROUTERS)} with its numbers ({error}). "
            + advice
        ) from error
    if problems:
        raise ValueError("\n".join(f"{source}.{line}" if source else line for line in problems))
    return router
