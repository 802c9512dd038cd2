"""The table of methods; a new one is a module with a class, and a row here.

scale  new blocks beside the base's, in attention and MLP, with an up stream (SCALE, arXiv 2511.03270)
grow   copies of the MLP that together give what the one gave (Grow, Don't Overwrite, arXiv 2603.08647)
depth  copies of whole blocks that at first add nothing (LLaMA Pro, arXiv 2401.02415)
"""

from __future__ import annotations

from collections.abc import Iterable

from scale_surgery.errors import PlanError, Problem
from scale_surgery.planning.depth import Depth
from scale_surgery.planning.grow import Grow
from scale_surgery.planning.method import Method
from scale_surgery.planning.scale import Scale

METHODS: dict[str, Method] = {method.name: method for method in (Scale(), Grow(), Depth())}
DEFAULT_METHOD = Scale.name


def variants() -> tuple[str, ...]:
    """Variants of all methods."""
    return tuple(variant for method in METHODS.values() for variant in method.variants)


def get_method(name: object) -> Method:
    """Find a method."""
    method = METHODS.get(name) if isinstance(name, str) else None
    if method is None:
        raise PlanError(Problem("value-unfit", "request.method", value=repr(name), kind=_one_of(METHODS)))
    return method


def method_of_variant(variant: object) -> Method:
    """Find the method that a variant belongs to."""
    for method in METHODS.values():
        if variant in method.variants:
            return method
    raise PlanError(Problem("value-unfit", "variant", value=repr(variant), kind=_one_of(variants())))


def _one_of(names: Iterable[str]) -> str:
    return f"one of: {', '.join(names)}"


def refuse(method: Method, operation: str, where: object) -> None:
    """Refuse an operation that makes no sense for the models of a method."""
    if problems := method.refusal(operation, where):
        raise PlanError(*problems)
