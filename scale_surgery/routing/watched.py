"""Watch the router of a loaded model: an observer takes its place in forward passes and records its weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any


class Observer:
    """Takes the place of a router and routes as it does; subclasses record what they override.

    Attributes:
        router: The router of a loaded model, whether its code came from this package or from the model's folder.
    """

    def __init__(self, router: Any) -> None:
        self.router = router

    def __getattr__(self, name: str) -> Any:
        return getattr(self.router, name)


class WeightObserver(Observer):
    """Records the weight of each path at the last token."""

    latest: tuple[float, ...] = ()

    def weights(self, evidence: Any) -> Any:
        """The log weights of the router."""
        from scale_surgery.modeling.expanded_routing import decided

        log_weights = self.router.weights(evidence)
        self.latest = tuple(decided(self.router, log_weights[0, -1]).exp().tolist())
        return log_weights


def observed_by(model: Any, observer: Observer) -> AbstractContextManager[None]:
    """Let an observer stand in for a model's router inside a `with` block, in this thread."""
    context: AbstractContextManager[None] = model.use_choice(model.choice._replace(router=observer))
    return context


@contextmanager
def watched(model: Any) -> Iterator[Sequence[tuple[float, ...]] | None]:
    """Weights of the paths in each forward pass so far, a list that grows; None where the model does not route."""
    if not getattr(model, "is_routing_enabled", False):
        yield None
        return
    observer = WeightObserver(model.choice.router)
    weights: list[tuple[float, ...]] = []
    # a prompt may be read in several parts, so a pass is noted when it is over
    hook = model.register_forward_hook(lambda *_: weights.append(observer.latest))
    try:
        with observed_by(model, observer):
            yield weights
    finally:
        hook.remove()
