"""A mean per token over texts, with its standard error."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# standard errors within which a difference may be chance
ERRORS = 2.0


@dataclass(frozen=True)
class MeanWithError:
    """A mean over texts.

    Attributes:
        value: The mean, nats per token.
        error: Its standard error over texts; infinity where there is one text alone, which tells nothing of others.
    """

    value: float
    error: float

    @property
    def noise(self) -> float:
        """The difference that may be chance, nats per token."""
        return ERRORS * self.error


def mean_with_error(nats: Tensor, tokens: Tensor) -> MeanWithError:
    """Mean per token over texts, and its standard error as that of a ratio of two sums.

        m = sum_i d_i / sum_i n_i,    error = sqrt(N / (N - 1) sum_i (d_i - m n_i)^2) / sum_i n_i

    Two settings read the same texts, so the error of their difference is that of a paired comparison.
    """
    total, texts = float(tokens.sum()), int((tokens > 0).sum())
    value = float(nats.sum()) / total
    rest = float((nats - value * tokens).square().sum())
    return MeanWithError(value, math.sqrt(rest * texts / (texts - 1)) / total if texts > 1 else math.inf)
