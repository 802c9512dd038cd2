"""A parameter budget, the best layers that it pays for, and ties; costs are those of the plan of an expansion."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isfinite

from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.deriving.planned import make_plan
from scale_surgery.errors import PlanError
from scale_surgery.planning.request import Request
from scale_surgery.training.ranking import LayerScore, ScoreName

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
BUDGET_FORMS = "30%, or 200M (also k and B)"

# parameters that an expansion of some layers adds
Price = Callable[[Sequence[int]], int]


def read_budget(text: str, parameters: int) -> int:
    """Read how many parameters an expansion may add.

    Args:
        text: A share of the base's parameters such as 30%, or a number such as 200M, 1.5B or 250000.
        parameters: Parameters of the base as stored.

    Returns:
        Number of parameters.

    Raises:
        PlanError: If it cannot be read, or is not above zero.
    """
    match = re.fullmatch(r"([0-9][0-9_]*\.?[0-9]*)\s*(%|[kKmMbB]?)", text.strip())
    number = float(match[1].replace("_", "")) if match else 0.0
    if match is None or not number or not isfinite(number):
        raise PlanError(f"--budget is {text!r}, expected a number of parameters above zero: {BUDGET_FORMS}.")
    return int(number / 100 * parameters if match[2] == "%" else number * UNITS[match[2].upper()])


def price_of(checkpoint: Checkpoint, request: Request, name: str) -> Price:
    """A function that says what an expansion of some layers adds, in parameters.

    Args:
        checkpoint: The base model.
        request: The expansion to be; its layers are replaced.
        name: What the base model is called.
    """

    def price(layers: Sequence[int]) -> int:
        wanted = replace(request, layers=",".join(map(str, layers)))
        return make_plan(checkpoint, wanted, name=name).costs.parameters_added

    return price


def check_budget(budget: int, layers: Sequence[int], price: Price, text: str) -> None:
    """Check that a budget pays for at least one layer.

    Raises:
        PlanError: If not; what the cheapest one costs is said.
    """
    costs = {layer: price([layer]) for layer in layers}
    cheapest = min(costs, key=lambda layer: costs[layer])
    if costs[cheapest] > budget:
        raise PlanError(
            f"--budget {text} is {budget:,} parameters, expected at least {costs[cheapest]:,}, what layer {cheapest} "
            "alone costs with what is added outside the layers. Raise it; with --method scale, a smaller --ratio makes "
            "layers cheaper."
        )


def choose_layers(budget: int, ranked: Sequence[int], price: Price) -> tuple[int, ...]:
    """Take as many layers as a budget pays for, the best first.

    A layer that does not fit is passed over: layer 0 brings new columns of the embedding with it, and may cost more
    than the next one.

    Args:
        budget: Parameters that may be added.
        ranked: Layers, the best first.
        price: What some layers cost.

    Returns:
        The layers, ascending.
    """
    chosen: list[int] = []
    for layer in ranked:
        if price(sorted([*chosen, layer])) <= budget:
            chosen.append(layer)
    return tuple(sorted(chosen))


def find_ties(layers: Sequence[LayerScore], chosen: Sequence[int], score: ScoreName) -> tuple[int, ...]:
    """Layers among which a score does not decide whether they are chosen.

    Args:
        layers: The layers.
        chosen: Numbers of those that were chosen.
        score: By which score.

    Returns:
        Chosen layers and others of which neither stands above the other, ascending; empty where the choice stands out.
    """
    tied = set()
    for one in (layer for layer in layers if layer.layer in chosen):
        for other in (layer for layer in layers if layer.layer not in chosen):
            if not one.stands_above(other, score) and not other.stands_above(one, score):
                tied |= {one.layer, other.layer}
    return tuple(sorted(tied))


def last_of_ties(order: Sequence[int], chosen: Sequence[int], tied: Sequence[int]) -> tuple[int, ...]:
    """The order in which the last of tied layers are taken first, after those that are chosen in any case."""
    sure = [layer for layer in order if layer in chosen and layer not in tied]
    rest = [layer for layer in order if layer not in sure and layer not in tied]
    return (*sure, *sorted(tied, reverse=True), *rest)
