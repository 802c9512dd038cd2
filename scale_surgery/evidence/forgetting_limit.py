"""The limit of forgetting: the models of an evaluation that forget more than they may."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scale_surgery.evidence.evaluate_models import Score

Unit = Literal["share of probes lost", "nats per token"]


@dataclass(frozen=True)
class ForgettingLimit:
    """A limit of forgetting, and its result.

    Attributes:
        most: Most forgetting.
        unit: Its unit: the share of the base's right answers that a model lost, or with texts alone nats per token of
            old text above the base's.
        exceeded: Models above it.
        unmeasured: Models whose forgetting could not be measured, which also count as above it.
    """

    most: float
    unit: Unit
    exceeded: tuple[str, ...]
    unmeasured: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """True if each model was measured and is within the limit."""
        return not (self.exceeded or self.unmeasured)


def limit_of(scores: Sequence[Score], most: float, has_probes: bool) -> ForgettingLimit:
    """Apply a limit to the given models; rows of parts, of strengths and of bases do not count."""
    models = {score.name: _forgetting(score, has_probes) for score in scores if score.kind in ("expanded", "other")}
    exceeded = (name for name, value in models.items() if value is not None and not value <= most)
    unmeasured = tuple(name for name, value in models.items() if value is None)
    unit: Unit = "share of probes lost" if has_probes else "nats per token"
    return ForgettingLimit(most, unit, tuple(exceeded), unmeasured)


def _forgetting(score: Score, has_probes: bool) -> float | None:
    if not has_probes:
        return score.forgetting
    return None if score.probes is None else score.probes.lost_share
