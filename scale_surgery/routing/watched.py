"""Watch a router while a model generates: the weights of its paths wherever a next token is predicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from scale_surgery.running.composing import is_composed


class WatchedRouter:
    """A router that routes as before and notes how much of its last prediction comes from the adapt path.

    Attributes:
        router: The router of a loaded model, whether its code came from this package or from the model's folder.
        weights: One number for each forward pass, from 0 to 1; 0 or 1 for a decision.
    """

    def __init__(self, router: Any) -> None:
        self.router = router
        self.weights: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.router, name)

    def logits(self, paths: Any, tokens: Any) -> Any:
        """The logits of the router."""
        # also where a model generates without a cache, the posterior router says what it would remember
        tokens.is_cached = True
        logits = self.router.logits(paths, tokens)
        self.weights.append(self._decide(paths, tokens) if tokens.result is None else _weigh(tokens.result[1]))
        return logits

    def _decide(self, paths: Any, tokens: Any) -> float:
        """The decision of a cosine router, from the same logits."""
        from scale_surgery.modeling.expanded_mixture import cosines

        z_p, z_a = paths.at(tokens.keep).base_logits()
        return float(cosines(z_p, z_a)[0, -1] <= self.router.threshold)


class WatchedMixture:
    """The router of a composed model that mixes as before and notes how much of its last prediction comes from whom.

    Attributes:
        mixture: The router of a loaded model.
        weights: Weight of each path in each forward pass, the base's first.
    """

    # who is left out says nothing of its weight, so nobody is
    prune = 0.0

    def __init__(self, mixture: Any) -> None:
        self.mixture = mixture
        self.weights: list[tuple[float, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.mixture, name)

    def logits(self, paths: Any, tokens: Any) -> Any:
        """The logits of the router."""
        tokens.is_cached = True
        logits = self.mixture.logits(paths, tokens)
        self.weights.append(tuple(tokens.result[1][0, -1, :, 0].exp().tolist()))
        return logits


def _weigh(odds: Any) -> float:
    """The weight of the adapt path, from the log odds of the preserve path after each token (1, tokens)."""
    return float((-odds[0, -1]).sigmoid())


@contextmanager
def watched(model: Any) -> Iterator[Sequence[float | tuple[float, ...]] | None]:
    """Watch the router of a loaded model inside a `with` block.

    Args:
        model: Any model. It reads one text at a time.

    Yields:
        The weight of the adapt path in each forward pass so far, or that of each path of a composed model, a list that
        grows; None where the model does not route.
    """
    if is_composed(model) and model.choice.mixture is not None:
        with _watched_mixture(model) as weights:
            yield weights
        return
    if not getattr(model, "is_routing_enabled", False):
        yield None
        return
    before = model.router
    model.router = WatchedRouter(before)
    try:
        yield model.router.weights
    finally:
        model.router = before


@contextmanager
def _watched_mixture(model: Any) -> Iterator[list[tuple[float, ...]]]:
    before = model.choice
    mixture = WatchedMixture(before.mixture)
    model.choice = before._replace(mixture=mixture)
    try:
        yield mixture.weights
    finally:
        model.choice = before
