"""Watch the router of a loaded model: an observer replaces it in forward passes and records its weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any


class Observer:
    """A replacement of a router that routes identically; subclasses override methods to record values.

    Attributes:
        router: The router of a loaded model, whether its code came from this package or from the model's folder.
    """

    def __init__(self, router: Any) -> None:
        self.router = router

    def __getattr__(self, name: str) -> Any:
        return getattr(self.router, name)


class WeightObserver(Observer):
    """An observer that records the weight of each path at the last token."""

    latest: tuple[float, ...] = ()

    def weights(self, evidence: Any) -> Any:
        """Return the log weights of the router, and record them."""
        from scale_surgery.modeling.expanded_routing import decided

        log_weights = self.router.weights(evidence)
        self.latest = tuple(decided(self.router, log_weights[0, -1]).exp().tolist())
        return log_weights


def observed_by(model: Any, observer: Observer) -> AbstractContextManager[None]:
    """Replace a model's router by an observer inside a `with` block, in this thread."""
    context: AbstractContextManager[None] = model.use_choice(model.choice._replace(router=observer))
    return context


@contextmanager
def watched(model: Any) -> Iterator[Sequence[tuple[float, ...]] | None]:
    """Yield a growing list of the paths' weights in each forward pass; None if the model does not route."""
    if not getattr(model, "is_routing_enabled", False):
        yield None
        return
    observer = WeightObserver(model.choice.router)
    weights: list[tuple[float, ...]] = []
    # the router may run several times in a pass, in parts of a prompt, so weights are stored after the pass
    hook = model.register_forward_hook(lambda *_: weights.append(observer.latest))
    try:
        with observed_by(model, observer):
            yield weights
    finally:
        hook.remove()
