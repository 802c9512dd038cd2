"""Many expansions on one model in memory: a stock model becomes a composed one, and that a stock one again."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from copy import deepcopy
from importlib import import_module
from keyword import iskeyword
from typing import Any

from scale_surgery import modeling
from scale_surgery.errors import PlanError
from scale_surgery.planning.plan import Plan
from scale_surgery.planning.routing_specs import base_specs, path_problems
from scale_surgery.running.sharing import descriptions, is_hooked, quantised_modules, spread, unhook

COMPOSED = f"{modeling.__name__}.expanded_composed"
SPREAD = "its base is spread over several devices, and paths that run side by side need one. Choose a single name."


def is_composed(model: Any) -> bool:
    """Whether a model has expansions under names."""
    return hasattr(model, "expanded_models")


def check_name(name: str, known: Collection[str]) -> None:
    """Refuse a name that an expansion cannot have.

    Args:
        name: The name.
        known: Names that others have.

    Raises:
        PlanError: If it is not made of letters, digits and underscores, is a word of ours, or is taken.
    """
    from torch import nn

    is_word = isinstance(name, str) and name.isidentifier()
    if not is_word or iskeyword(name) or name == "base" or hasattr(nn.ModuleDict(), name):
        raise PlanError(
            f"name: is {name!r}, expected letters, digits and underscores, no digit first, and no word of Python's or "
            "ours. Choose another, such as medicine."
        )
    if name in known:
        raise PlanError(
            f"name: {name} is an expansion of this model already, expected a new name. Choose another, or take that "
            "one off first: compose --remove, or model.delete_expansion."
        )


def expansion_problems(name: str | None, paths: Sequence[str], model: str) -> Iterator[str]:
    """What is wrong with the expansion that is asked for.

    Args:
        name: Its name, or None.
        paths: Names of the paths of the model; none where it is no composed one.
        model: What it is called.
    """
    if name is not None and not paths:
        yield f"expansion {name}: {model} has no expansions under names, expected a composed folder. Leave it out."
    elif name is not None and name not in paths:
        yield f"expansion {name}: is no path of {model}, expected {' or '.join(paths)}."


def compose(model: Any, plan: Plan) -> Any:
    """Make a composed model of a stock one, without an expansion yet; it shares the weights, frozen.

    Args:
        model: The stock model, which stays as it is.
        plan: That of any expansion of it.
    """
    made = _on_same_weights(model, {})
    made.__class__ = import_module(COMPOSED).composed_class(type(model))
    made.become_composed(base_specs(plan.architecture, plan.sizes))
    spread(model, made)
    return made


def base_alone(model: Any) -> Any:
    """The stock model that a composed one is with no expansion, on the same weights."""
    with model.use_expansion(None):
        model._arrange(())
        alone = _on_same_weights(model, {id(model.expanded_models): None})
    alone.__class__ = type(model).__bases__[1]
    del alone._modules["expanded_models"]
    spread(model, alone)
    return alone


def add_expansion(model: Any, name: str, expanded: Any, plan: Plan) -> Any:
    """Take up an expanded model in a composed one under a name.

    Args:
        model: The composed model.
        name: A name that was checked.
        expanded: The expanded model, on the same weights.
        plan: Its plan.

    Returns:
        The composed model.
    """
    problems = path_problems(plan.architecture, min(plan.collaboration.layers, default=None))
    if is_hooked(model):
        problems = [*problems, SPREAD]
    model.add_expanded_model(name, expanded, problems)
    return model


def _on_same_weights(model: Any, known: dict[int, Any]) -> Any:
    """A copy whose parameters are frozen views of the model's, without hooks that carry from device to device."""
    from torch import nn

    frozen = {id(own): nn.Parameter(own.detach(), requires_grad=False) for own in model.parameters()}
    copied = deepcopy(model, {**frozen, **_quantised(model), **known})
    unhook(copied)
    return copied


def _quantised(model: Any) -> dict[int, Any]:
    """What a copy shares with a model of its quantised modules: their weights, and what describes these."""
    shared = [module.weight for module in quantised_modules(model).values()]
    shared += [own for module in quantised_modules(model).values() for own in descriptions(module).values()]
    return {id(own): own for own in shared}
