"""Routers weigh the paths of a model, token by token.

    posterior   log Σ_k w_k p_k, where w_k is the posterior probability that path k explains the tokens read so far:

                    v_k(t) ∝ w_k(t) p_k(y_t)        w_k(t+1) = (1 - r) v_k(t) + (r / K) Σ_{j≠k} v_j(t)

                Bayes' mixture of K + 1 paths with fixed share r (Herbster and Warmuth 1998). With r = 0 no text loses
                more than -ln of a path's prior against that path.
    cosine      of two paths, Z_p and Z_a being the logits of their base streams and Z_up what their up streams add:
                if cos(Z_p, Z_a) > threshold: (Z_p + Z_a) / 2 + Z_up_p, else Z_a + Z_up_a (SCALE, arXiv 2511.03270, eq.
                5); strict: Z_p alone instead of the first

A router has numbers and a method `weights`; ROUTERS lists all of them. The file is also read without torch, for the
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
    """Base class of routers. A router makes one set of logits from several paths.

    A router is a frozen dataclass: its fields are `router`, its name, and its numbers, each with a default. It needs
    `weights`; `problems` checks its numbers.

    Attributes:
        router: Its name.
        reads_tokens: Whether it weighs paths by their predictions of the tokens read; it then has a state in the cache.
        is_hard: Whether the heaviest path gets all the weight; its logits are then returned unchanged.
        bound: Nats that any text may lose: against the base, or with many paths against the best of them; None without
            a bound.
        bound_per_token: Nats that each further token adds to the bound.
    """

    router: str
    reads_tokens: ClassVar[bool] = True
    is_hard: ClassVar[bool] = False
    bound: float | None = None
    bound_per_token: float | None = None

    def for_expansions(self, expansions: int) -> Router:
        """Fill in the missing numbers for so many expansions."""
        return self

    def without_prior(self) -> Router:
        """Return this router without numbers of single paths."""
        return self

    def problems(self, expansions: int) -> list[str]:
        """List the problems of its numbers for so many expansions."""
        return []

    def paths(self, expansions: tuple[str, ...]) -> tuple[Path, ...]:
        """List the paths that run."""
        from .expanded_paths import BASE, Path

        return (BASE, *(Path(name) for name in expansions))

    def sides(self, features: Features) -> tuple[list[WeighedPath], Tensor | None]:
        """List the weighed paths, and return a number for each position that it takes from logits (b, t), or None."""
        return features.sides(), None

    def read_logits(self, features: Features) -> tuple[list[Tensor], Tensor | None]:
        """Compute the logits of each weighed path (b, t, v), and return the same number beside them, or None."""
        sides, observed = self.sides(features)
        return [features.whole(side) for side in sides], observed

    def weights(self, evidence: Evidence) -> Tensor:
        """Compute the log weights of the paths after each token (b, t, k), float32.

        A router remembers only the weights after the last token, which the next forward finds in `evidence.before`. So
        the weights after a token may depend only on that token and on the weights before it. At a restart there are no
        weights before.
        """
        raise NotImplementedError

    @property
    def settings(self) -> dict[str, Any]:
        """Return its name and its numbers, as config.json stores them."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


@dataclass(frozen=True)
class PosteriorRouter(Router):
    """The Bayes mixture of all paths; see the module."""

    router: str = field(default="posterior", init=False)
    # initial weights of the base and of each expansion, which sum to 1. A single number is the base's, and the
    # expansions share the rest equally. None: all paths have the same.
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
    strict: bool = False  # whether the preserve path is the base model alone, without an up stream

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
            # logits are large, so the mean is made in place if nothing trains
            bases = [(z_p + z_a) / 2, z_a.clone()] if z_a.requires_grad else [z_p.add_(z_a).div_(2), z_a]
        return features.sides(bases), observed

    def weights(self, evidence: Evidence) -> Tensor:
        import torch

        is_adapt = evidence.observed <= self.threshold
        return torch.stack((~is_adapt, is_adapt), -1).float().log()


ROUTERS: dict[str, type] = {kind.router: kind for kind in (PosteriorRouter, CosineRouter)}


def make_router(settings: dict[str, Any], expansions: int, source: str = "") -> Router:
    """Make the router that settings name; by default the posterior one.

    Args:
        settings: `router`, and its numbers.
        expansions: How many expansions it weighs beside the base.
        source: Origin of the settings for errors, if they are not arguments.

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
