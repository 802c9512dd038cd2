"""Watch the router of a loaded model: in a forward pass something stands in for it, which notes what it sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any


class Observer:
    """Stands in for a router, and routes as that does; what notes more overrides what it notes.

    Attributes:
        router: The router of a loaded model, whether its code came from this package or from the model's folder.
    """

    def __init__(self, router: Any) -> None:
        self.router = router

    def __getattr__(self, name: str) -> Any:
        return getattr(self.router, name)


class WeightObserver(Observer):
    """Notes the weight of each path where the last next token is predicted."""

    latest: tuple[float, ...] = ()

    def weights(self, evidence: Any) -> Any:
        """The log weights of the router."""
        log_weights = self.router.weights(evidence)
        self.latest = tuple(log_weights[0, -1].exp().tolist())
        return log_weights


def observed_by(model: Any, observer: Observer) -> AbstractContextManager[None]:
    """Let an observer stand in for a model's router inside a `with` block, in this thread."""
    context: AbstractContextManager[None] = model.use_choice(model.choice._replace(router=observer))
    return context


@contextmanager
def watched(model: Any) -> Iterator[Sequence[tuple[float, ...]] | None]:
    """Watch the router of a loaded model while it generates, inside a `with` block."""
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
