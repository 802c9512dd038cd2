"""Choose the best setting of a router: most learning, within limits of forgetting, for a sufficient gain.

every setting --bound, short prompts--> allowed --forgetting--> learns most --gain--> proposed, or the present one
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from scale_surgery.errors import PlanError, Problem
from scale_surgery.fields import NO_OPTION, Range, problems_of
from scale_surgery.modeling.expanded_routers import Router
from scale_surgery.routing.outcome import Outcome

# nats per token of old text that may be forgotten, also on short prompts
NEGLIGIBLE = 0.02
# tolerance for logarithms of equal numbers
ROUNDING = 1e-9
Nats = Annotated[float, Range(least=0, noun="nats per token")]


@dataclass(frozen=True)
class CalibrationSettings:
    """Criteria for the best setting of a router, and its outputs.

    Attributes:
        most_forgetting: Maximum forgetting on old text, in nats per token.
        bound: Maximum by which the loss of a text may exceed the base's, in nats: -ln(prior) of a posterior router. For
            a composed model, the limit is relative to its best path. Default: the bound of the current setting.
        bound_per_token: Maximum increase of the bound for each further token, in nats: -ln(1 - switch rate). Default:
            the increase of the current setting.
        most_short_forgetting: Maximum forgetting on the first 8 tokens of old texts, in nats per token. Default: 0.02
            more than the current setting, with twice the standard error over texts added. With a looser bound, the
            limit is the bound's.
        least_gain: Minimum gain of a change from the current setting, as a share of the possible learning. The gain
            must also exceed twice the standard error over texts. 0 takes any gain.
        write: Store the best setting in the model.
        plot: PNG or SVG file for a plot of forgetting against learning, one point for each setting. An existing file is
            replaced. Default: none.
    """

    most_forgetting: Nats = NEGLIGIBLE
    bound: Annotated[float, Range(above=0, noun="nats")] | None = None
    bound_per_token: Nats | None = field(default=None, metadata=NO_OPTION)
    most_short_forgetting: Nats | None = field(default=None, metadata=NO_OPTION)
    least_gain: Annotated[float, Range(least=0, below=1, noun="a share")] = field(default=0.01, metadata=NO_OPTION)
    write: bool = False
    plot: Path | None = None


@dataclass(frozen=True)
class Limits:
    """Limits of the best setting in nats, and its needed gain.

    Attributes:
        forgetting: Most loss per token of old text.
        bound: Most loss of any text; None if the router has no bound.
        bound_per_token: Most increase of the bound per further token.
        short: Most loss per token of short prompts; None for the present loss plus a negligible one.
        gain: Share of the possible learning that a change must gain; 0 for any gain.
    """

    forgetting: float
    bound: float | None
    bound_per_token: float | None
    short: float | None
    gain: float

    def keeps_bound(self, outcome: Outcome) -> bool:
        """Return True if the bound of a setting is within the limits."""
        pairs = ((outcome.bound, self.bound), (outcome.bound_per_token, self.bound_per_token))
        return all(value is None or most is None or value <= most + ROUNDING for value, most in pairs)

    def keeps_short(self, outcome: Outcome) -> bool:
        """Return True if the loss on short prompts is within the limit."""
        if self.short is not None:
            return outcome.short.forgetting <= self.short
        change = outcome.short.change
        # loss plus error has to be negligible, so that few texts do not pass by chance; a single text must not lose
        return change.value + change.noise <= NEGLIGIBLE if math.isfinite(change.noise) else change.value <= 0.0

    def allows(self, outcome: Outcome) -> bool:
        """Return True if a setting keeps both limits."""
        return self.keeps_bound(outcome) and self.keeps_short(outcome)


@dataclass(frozen=True)
class RouterChoice:
    """The chosen settings.

    Attributes:
        proposed: The proposed setting: the best, or the present one if the best gains too little.
        best: Of the allowed settings, the one that learns most among those that forget little enough; if there is none,
            the one that forgets least.
        loosest: The best of all settings, without limits on texts and short prompts.
        needed: Nats per token that the best must learn more than the present setting, to replace it.
    """

    proposed: Outcome
    best: Outcome
    loosest: Outcome
    needed: float


def read_limits(settings: CalibrationSettings, present: Router) -> Limits:
    """Limits of the user, and those of the present setting for the rest."""
    problems = problems_of(settings)
    asked = {"--bound": settings.bound, "bound_per_token": settings.bound_per_token}
    given = {name: value for name, value in asked.items() if value is not None}
    if present.bound is None:
        problems += [
            Problem("router-without-bound", name, limit=value, router=present.router) for name, value in given.items()
        ]
    if problems:
        raise PlanError(*problems)
    pairs = ((settings.bound, present.bound), (settings.bound_per_token, present.bound_per_token))
    bound, per_token = (limit if limit is not None else now for limit, now in pairs)
    is_looser = any(limit is not None and now is not None and limit > now + ROUNDING for limit, now in pairs)
    short = math.inf if is_looser and settings.most_short_forgetting is None else settings.most_short_forgetting
    return Limits(settings.most_forgetting, bound, per_token, short, settings.least_gain)


def choose(outcomes: Sequence[Outcome], limits: Limits, adapt: Outcome) -> RouterChoice:
    """Choose the best allowed setting, and keep the present one if the gain is too small."""
    present, allowed = outcomes[0], [outcome for outcome in outcomes if limits.allows(outcome)]
    if not allowed:
        raise PlanError(*_unmet_limits(outcomes, limits))
    best, loosest = (propose(some, limits.forgetting) for some in (allowed, outcomes))
    reachable = max(0.0, adapt.learning, *(outcome.learning for outcome in outcomes))
    needed = max(best.gain.noise, limits.gain * reachable) if limits.gain else 0.0
    stays = limits.allows(present) and present.forgetting <= limits.forgetting and not best.gain.value > needed
    return RouterChoice(present if stays else best, best, loosest, needed)


def propose(outcomes: Sequence[Outcome], most_forgetting: float) -> Outcome:
    """Return the outcome that learns most within the limit of forgetting, or else the one that forgets least."""
    within = [outcome for outcome in outcomes if outcome.forgetting <= most_forgetting]
    if within:
        return max(within, key=lambda outcome: (outcome.learning, -outcome.forgetting))
    return min(outcomes, key=lambda outcome: (outcome.forgetting, -outcome.learning))


def _unmet_limits(outcomes: Sequence[Outcome], limits: Limits) -> list[Problem]:
    """List the limits that no setting keeps, with the lowest values that settings reach."""
    within = [outcome for outcome in outcomes if limits.keeps_bound(outcome)]
    if not within:
        return _unmet_bounds(outcomes, limits)
    lowest = min(within, key=lambda outcome: outcome.short.forgetting)
    least, numbers = lowest.short.forgetting, lowest.numbers
    if limits.short is None:
        return [Problem("short-prompts-lose-more", least=least, numbers=numbers, limit=_round_up(least))]
    return [Problem("short-limit-unmet", "most_short_forgetting", limit=limits.short, least=least, numbers=numbers)]


def _unmet_bounds(outcomes: Sequence[Outcome], limits: Limits) -> list[Problem]:
    """List the bounds that no setting keeps, with the lowest ones."""
    by_text = min(outcomes, key=lambda outcome: outcome.bound or 0.0)
    by_token = min(outcomes, key=lambda outcome: outcome.bound_per_token or 0.0)
    unmet = [
        Problem("bound-unmet", name, limit=asked, least=least, numbers=lowest.numbers)
        for name, asked, least, lowest in (
            ("--bound", limits.bound, by_text.bound, by_text),
            ("bound_per_token", limits.bound_per_token, by_token.bound_per_token, by_token),
        )
        if asked is not None and least is not None and least > asked + ROUNDING
    ]
    return unmet or [Problem("bounds-unmet", "--bound", bound=limits.bound, per_token=limits.bound_per_token)]


def ask_for(outcome: Outcome, limits: Limits, needed: float) -> str:
    """Return the options that would allow a setting."""
    words = [
        _option("--bound ", outcome.bound, limits.bound),
        _option("--set bound_per_token=", outcome.bound_per_token, limits.bound_per_token),
    ]
    if limits.keeps_bound(outcome) and not limits.keeps_short(outcome):
        words.append(f"--set most_short_forgetting={_round_up(outcome.short.forgetting):g}")
    words.append("--set least_gain=0" if outcome.gain.value <= needed else "")
    return " ".join(filter(None, words))


def given_options(limits: Limits, present: Outcome) -> tuple[str, ...]:
    """Return the options that set these limits; limits equal to a default are omitted."""
    usual = CalibrationSettings()
    pairs = {
        "--most-forgetting {}": (limits.forgetting, usual.most_forgetting),
        "--bound {}": (limits.bound, present.bound),
        "--set bound_per_token={}": (limits.bound_per_token, present.bound_per_token),
        "--set most_short_forgetting={}": (limits.short, None),
        "--set least_gain={}": (limits.gain, usual.least_gain),
    }
    # a looser bound lifts the limit of short prompts to infinity, which cannot be typed
    given = [(form, limit) for form, (limit, default) in pairs.items() if limit not in (None, default, math.inf)]
    return tuple(word for form, limit in given for word in form.format(limit).split())


def _option(name: str, value: Any, most: Any) -> str:
    return "" if value is None or value <= most + ROUNDING else f"{name}{_round_up(value):g}"


def _round_up(number: float) -> float:
    """Round up to three digits, so that the number stays within a limit of the same three digits."""
    digits = 2 - math.floor(math.log10(number)) if number > 0 else 0
    scale: float = 10.0**digits
    return math.ceil(number * scale) / scale
