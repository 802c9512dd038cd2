"""Settings by which a base writes text for its own rehearsal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median_high

from scale_surgery.errors import counted
from scale_surgery.training.settings import TrainingSettings

# samples in one call of generate; fewer if sequences are long, because KV caches take memory
TOGETHER, TOKENS_TOGETHER = 64, 16_384
# sampled tokens as a share of the rehearsed ones, so that each is read about twice; and most texts. Measured on the
# shipped model (benchmarks/rehearsal.md)
DRAWN, MOST_TEXTS = 0.5, 800
# texts of the last batch as a multiple of those that are missing: one more batch would take as long as a large one
SPARE = 1.5


@dataclass(frozen=True)
class Sampling:
    """Settings of the sampler.

    Attributes:
        count: Most texts.
        length: Most tokens of a text, including the first.
        temperature: Temperature of the distribution.
        seed: Seed of everything random.
        enough: Tokens of all texts after which sampling stops. Default: all texts are sampled.
        new_tokens: Most tokens after the beginning of a text. Default: what `length` leaves.
    """

    count: int
    length: int
    temperature: float
    seed: int
    enough: int | None = None
    new_tokens: int | None = None

    @property
    def tokens(self) -> int:
        """Upper limit or estimate of the tokens of all texts."""
        most = self.count * self.length
        return most if self.enough is None else min(most, self.enough)

    @property
    def least(self) -> int:
        """Number of texts that are needed even if all reach their full length."""
        return self.count if self.enough is None else min(self.count, math.ceil(self.enough / self.length))

    @property
    def rows(self) -> int:
        """Most texts in one call of generate."""
        return max(1, min(TOGETHER, TOKENS_TOGETHER // self.length, self.least))

    def batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Generate batches of texts, each text as the place of its beginning, given the tokens of each beginning.

        Beginnings take turns. Those of a batch have equal lengths, so that no text depends on padding.
        """
        # texts of one group are certainly needed, or come after all earlier ones: grouped by length within it, they
        # stay spread over the beginnings when sampling stops early
        group = self.rows * math.ceil(self.least / self.rows)
        for start in range(0, self.count, group):
            alike: dict[int, list[int]] = {}
            for number in range(start, min(start + group, self.count)):
                place = number % len(lengths)
                alike.setdefault(lengths[place], []).append(place)
            for places in alike.values():
                yield from (places[first : first + self.rows] for first in range(0, len(places), self.rows))

    def missing(self, texts: int, tokens: int) -> int:
        """Return how many texts to sample next, given how many there are and their tokens; 0 if these are enough."""
        if self.enough is None or not texts:
            return self.rows
        return max(0, math.ceil(SPARE * (self.enough - tokens) * texts / tokens))

    def rows_at_once(self, lengths: Sequence[int]) -> int:
        """Return the usual number of texts in one call of generate, given the tokens of each beginning."""
        needed = replace(self, count=self.least, enough=None)
        return median_high(len(places) for places in needed.batches(lengths))

    def describe(self, lengths: Sequence[int]) -> str:
        """Describe the samples before they are drawn."""
        texts, rows = counted(self.count, "text"), self.rows_at_once(lengths)
        drawn = texts if self.enough is None else f"about {self.tokens:,} tokens in at most {texts}"
        begun = f" from {counted(len(lengths), 'beginning')}" if len(lengths) > 1 else ""
        return f"the base writes {drawn}{begun}" + (f", {rows:,} at once" if rows > 1 else "")


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
