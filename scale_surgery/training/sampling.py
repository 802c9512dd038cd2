"""Settings by which a base writes text for its own rehearsal."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scale_surgery.errors import counted
from scale_surgery.training.settings import TrainingSettings

# samples in one call of generate; fewer if sequences are long, because KV caches take memory
TOGETHER, TOKENS_TOGETHER = 64, 16_384
# sampled tokens as a share of the rehearsed ones, so that each is read about twice; and most texts. Measured on the
# shipped model (benchmarks/rehearsal.md)
DRAWN, MOST_TEXTS = 0.5, 800


@dataclass(frozen=True)
class Sampling:
    """Settings of the sampler.

    Attributes:
        count: Most texts.
        length: Most tokens of a text, including the first.
        temperature: Temperature of the distribution.
        seed: Seed of everything random.
        enough: Tokens of all texts after which sampling stops. Default: all texts are sampled.
    """

    count: int
    length: int
    temperature: float
    seed: int
    enough: int | None = None

    @property
    def tokens(self) -> int:
        """Upper limit or estimate of the tokens of all texts."""
        most = self.count * self.length
        return most if self.enough is None else min(most, self.enough)

    def rows(self, begins: int) -> int:
        """Return the number of texts in one call of generate, given the number of prompts."""
        least = self.count if self.enough is None else min(self.count, math.ceil(self.enough / self.length))
        return max(1, min(TOGETHER, TOKENS_TOGETHER // self.length, math.ceil(least / begins)))

    def describe(self, begins: int = 1) -> str:
        """Describe the samples before they are drawn."""
        texts, rows = counted(self.count, "text"), self.rows(begins)
        drawn = texts if self.enough is None else f"about {self.tokens:,} tokens in at most {texts}"
        return f"the base writes {drawn}, {rows:,} at once" if rows > 1 else f"the base writes {drawn}"


def sampling_of(settings: TrainingSettings, batches: int, sequence: int, length: int) -> Sampling:
    """Return the sampler's settings for a run.

    Args:
        settings: Settings of the run.
        batches: Forward passes with rehearsal, of all processes.
        sequence: Tokens of a sequence to learn.
        length: Most tokens of a sample.
    """
    how = (length, settings.rehearsal_temperature, settings.seed)
    if settings.rehearsal_samples is not None:
        return Sampling(settings.rehearsal_samples, *how)
    rows = batches * settings.rehearsed_rows
    # if texts are not packed, each sample is a sequence
    count = MOST_TEXTS if settings.packing else min(MOST_TEXTS, math.ceil(rows * DRAWN))
    return Sampling(count, *how, enough=math.ceil(rows * sequence * DRAWN))
