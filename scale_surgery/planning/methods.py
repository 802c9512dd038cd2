"""The table of methods; a new one is a module with a class, a row here, and its variants in `request`.

scale  new blocks beside the base's, in attention and MLP, with an up stream (SCALE, arXiv 2511.03270)
grow   copies of the MLP that together give what the one gave (Grow, Don't Overwrite, arXiv 2603.08647)
depth  copies of whole blocks that at first add nothing (LLaMA Pro, arXiv 2401.02415)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from scale_surgery.errors import PlanError, Problem
from scale_surgery.fields import fields_of, problems_of
from scale_surgery.planning.depth import Depth
from scale_surgery.planning.grow import Grow
from scale_surgery.planning.method import Method
from scale_surgery.planning.new_tokens import problems_of_tokens
from scale_surgery.planning.request import NO_LAYERS, Request, variants
from scale_surgery.planning.scale import Scale
from scale_surgery.planning.selection import select_layers

METHODS: dict[str, Method] = {method.name: method for method in (Scale(), Grow(), Depth())}


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


def complete(request: Request, layers: int | None = None) -> Request:
    """Check a request, and fill in the defaults of its method: the variant, and how many copies."""
    # the command line checks the same, but Python callers and edited plans come here unchecked
    problems = problems_of(request, with_ranges=False)
    problems += problems_of_tokens(request.new_tokens) if request.new_tokens is not None else []
    if problems:
        raise PlanError(*problems)
    method = METHODS[request.method]
    problems = [*_foreign_problems(request), *method.problems(request)]
    if problems:
        raise PlanError(*problems, *_layer_problems(request, layers))
    # as a record gives it back
    return method.complete(replace(request, ratio=float(request.ratio)))


def _layer_problems(request: Request, layers: int | None) -> tuple[Problem, ...]:
    if request.layers == NO_LAYERS:
        return ()
    try:
        select_layers(request.layers, layers) if layers is not None else None
    except PlanError as error:
        return error.problems
    return ()


def _foreign_problems(request: Request) -> list[Problem]:
    """Find a variant of another method, and values that only other methods read."""
    asked, variant, variants = request.method, request.variant, METHODS[request.method].variants
    problems, known = list[Problem](), fields_of(Request)
    if variant not in (None, *variants):
        given = {"variant": variant, "variants": variants, "method": asked}
        problems.append(Problem("variant-of-other-method", "--variant", **given))
    options = [(owner, known[name]) for owner, method in METHODS.items() if owner != asked for name in method.options]
    problems += [
        Problem("option-of-other-method", option.typed, value=value, owner=owner)
        for owner, option in options
        if (value := getattr(request, option.name)) != option.default
    ]
    return problems
