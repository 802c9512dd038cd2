"""Choose the best setting of a router: most learning, within limits of the bound and of forgetting.

every setting --bound--> allowed --forgetting--> learns most --gain--> proposed, or the present one
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from scale_surgery.errors import PlanError, Problem
from scale_surgery.fields import Range, problems_of
from scale_surgery.modeling.expanded_routers import Router
from scale_surgery.routing.outcome import Outcome

# tolerance for logarithms of equal numbers
ROUNDING = 1e-9


@dataclass(frozen=True)
class CalibrationSettings:
    """Limits of the best setting of a router, and its outputs.

    Attributes:
        most_forgetting: Maximum forgetting in nats per token, on old text and on the first 8 tokens of old texts. For a
            composed model, the limit on first tokens is relative to the current setting.
        bound: Maximum by which the loss of a text may exceed the base's, in nats: -ln(prior) of a posterior router. For
            a composed model, the limit is relative to its best path. Given, it also lifts the limit on the increase per
            token. Default: both limits are those of the current setting.
        write: Store the best setting in the model. If every allowed setting forgets more, the model stays as it is.
        plot: PNG or SVG file for a plot of forgetting against learning, one point for each setting. An existing file is
            replaced. Default: none.
    """

    most_forgetting: Annotated[float, Range(least=0, noun="nats per token")] = 0.02
    bound: Annotated[float, Range(above=0, noun="nats")] | None = None
    write: bool = False
    plot: Path | None = None


@dataclass(frozen=True)
class Limits:
    """Limits of the best setting, in nats.

    Attributes:
        forgetting: Most loss per token, on old text and on the first tokens of old texts.
        bound: Most loss of any text; None if the router has no bound.
        bound_per_token: Most increase of the bound per further token.
        at_present: Loss per token of first tokens with the present setting of a composed model, which is allowed.
    """

    forgetting: float
    bound: float | None
    bound_per_token: float | None
    at_present: float = 0.0

    def allows(self, outcome: Outcome) -> bool:
        """Return True if the bound of a setting is within the limits."""
        pairs = ((outcome.bound, self.bound), (outcome.bound_per_token, self.bound_per_token))
        return all(value is None or most is None or value <= most + ROUNDING for value, most in pairs)

    def keeps(self, outcome: Outcome) -> bool:
        """Return True if a setting forgets little enough, on old text and on its first tokens."""
        # few short prompts show little, so the forgetting that they may hide counts too
        on_first = outcome.short.value + outcome.short.noise - self.at_present
        return max(outcome.forgetting, on_first) <= self.forgetting


@dataclass(frozen=True)
class RouterChoice:
    """The chosen settings.

    Attributes:
        proposed: The proposed setting: the best, or the present one if the best gains too little.
        best: Of the allowed settings, the one that learns most among those that forget little enough; if there is none,
            the one that forgets least.
        is_within: True if the proposed setting forgets little enough.
    """

    proposed: Outcome
    best: Outcome
    is_within: bool


def read_limits(settings: CalibrationSettings, present: Router) -> Limits:
    """Limits of the user, and those of the present setting for the rest."""
    problems = problems_of(settings)
    if settings.bound is not None and present.bound is None:
        problems.append(Problem("router-without-bound", "--bound", limit=settings.bound, router=present.router))
    if problems:
        raise PlanError(*problems)
    if settings.bound is None:
        return Limits(settings.most_forgetting, present.bound, present.bound_per_token)
    return Limits(settings.most_forgetting, settings.bound, math.inf)


def relative(limits: Limits, present: Outcome) -> Limits:
    """Return the limits of a composed model: any prior of many paths costs something on first tokens."""
    # the noise of one text is infinite, and no setting may pass by it
    known = present.short.value + (present.short.noise if math.isfinite(present.short.noise) else 0.0)
    return replace(limits, at_present=max(0.0, known))


def choose(outcomes: Sequence[Outcome], limits: Limits) -> RouterChoice:
    """Choose the best allowed setting, and keep the present one, which is the first, if the gain may be chance."""
    present, allowed = outcomes[0], [outcome for outcome in outcomes if limits.allows(outcome)]
    if not allowed:
        lowest = min(outcomes, key=lambda outcome: outcome.bound or 0.0)
        found = {"limit": limits.bound, "least": lowest.bound, "numbers": lowest.numbers}
        raise PlanError(Problem("bound-unmet", "--bound", **found))
    within = [outcome for outcome in allowed if limits.keeps(outcome)]
    if not within:
        least = min(allowed, key=lambda outcome: (outcome.forgetting, -outcome.learning))
        return RouterChoice(least, least, is_within=False)
    best = max(within, key=lambda outcome: (outcome.learning, -outcome.forgetting))
    stays = present in within and best.gain.value <= best.gain.noise
    return RouterChoice(present if stays else best, best, is_within=True)
