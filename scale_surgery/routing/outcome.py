"""Scores of a model with one setting of its router against its base, with their standard error over texts."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from scale_surgery.folder.routers import numbers_of
from scale_surgery.modeling.expanded_routers import Router
from scale_surgery.running.loss import Measurement

if TYPE_CHECKING:
    from torch import Tensor


# standard errors within which a difference may be chance
ERRORS = 2.0


@dataclass(frozen=True)
class MeanWithError:
    """A mean over texts.

    Attributes:
        value: The mean, nats per token.
        error: Its standard error over texts; infinity for a single text, which shows no variation.
    """

    value: float
    error: float

    @property
    def noise(self) -> float:
        """The difference that may be chance, nats per token."""
        return ERRORS * self.error


def mean_with_error(nats: Tensor, tokens: Tensor) -> MeanWithError:
    """Return the mean per token over texts, with the standard error of a ratio of two sums."""
    # m = sum_i d_i / sum_i n_i,   error = sqrt(N / (N - 1) sum_i (d_i - m n_i)^2) / sum_i n_i
    # two settings read the same texts, so the error of their difference is that of a paired comparison
    total, texts = float(tokens.sum()), int((tokens > 0).sum())
    value = float(nats.sum()) / total
    rest = float((nats - value * tokens).square().sum())
    return MeanWithError(value, math.sqrt(rest * texts / (texts - 1)) / total if texts > 1 else math.inf)


@dataclass(frozen=True)
class Outcome:
    """The scores of a model with one setting of its router.

    Attributes:
        routing: The setting; None for the base model and for the adapt path alone.
        old: Score on old text.
        new: Score on new text.
        forgetting: Its nats per token on old text minus those of the base.
        learning: The base's nats per token on new text minus its own.
        kept: Learning as a share of the learning of the adapt path alone; None if the adapt path learns nothing.
        routed_old: Routed share of old text: the mean weight of the adapt path over the scored tokens.
        routed_new: Routed share of new text.
        gain: Learning minus that of the present setting, with its error over texts.
        short: Forgetting on the first tokens of old texts, with its error over texts.
    """

    routing: Router | None
    old: Measurement
    new: Measurement
    forgetting: float
    learning: float
    kept: float | None
    routed_old: float
    routed_new: float
    gain: MeanWithError
    short: MeanWithError

    @property
    def numbers(self) -> str:
        """The numbers of the setting, in words; empty without a setting."""
        return "" if self.routing is None else numbers_of(self.routing)

    @property
    def bound(self) -> float | None:
        """Most nats that any text may lose against the base, or against the best of several paths; see the setting."""
        return None if self.routing is None else self.routing.bound

    @property
    def bound_per_token(self) -> float | None:
        """Nats that each further token adds to the bound; see `Router`."""
        return None if self.routing is None else self.routing.bound_per_token

    def to_json(self) -> dict[str, Any]:
        """Return the outcome as plain JSON values, with values derived from the sums."""
        content = asdict(self) | {"bound": self.bound, "bound_per_token": self.bound_per_token}
        content["routing"] = None if self.routing is None else self.routing.settings
        for side, side_measurement in (("old", self.old), ("new", self.new)):
            content[side] |= {"nats_per_token": side_measurement.nats_per_token, "accuracy": side_measurement.accuracy}
        return content
