"""The result of a comparison, which is also its record in compare.json."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from scale_surgery.checkpoint.files import plain_json
from scale_surgery.comparing.settings import CompareSettings
from scale_surgery.running.loss import Measurement

# a method counts as learning as much as the best one from this share of its learning on
ENOUGH = 0.9


@dataclass(frozen=True)
class Losses:
    """Scores on held-out old and new text."""

    old: Measurement
    new: Measurement

    @property
    def is_finite(self) -> bool:
        """True if both losses are numbers."""
        return math.isfinite(self.old.nats + self.new.nats)


@dataclass(frozen=True)
class Try:
    """A learning rate that was tried on a share of the tokens.

    Attributes:
        method: The method.
        factor: Multiple of the method's default rate.
        rate: The rate.
        losses: Losses on text that is not measured at the end; None if training diverged.
    """

    method: str
    factor: float
    rate: float
    losses: Losses | None

    @property
    def total(self) -> float:
        """Nats per token of old text plus those of new text; infinity if training diverged."""
        if self.losses is None:
            return math.inf
        return self.losses.old.nats_per_token + self.losses.new.nats_per_token


@dataclass(frozen=True)
class Row:
    """A method that was trained with all tokens.

    Attributes:
        method: Its name.
        rate: Its peak learning rate, the best of those that were tried.
        rehearses: True if it stays close to the base on own samples.
        parameters: Trained parameters.
        step_seconds: Median of the seconds of a step.
        peak_bytes: Most memory while it trained, weights included.
        served_bytes: Bytes of the weights that are served, in the dtype of the base.
        token_seconds: Seconds for a token of an answer, with batch size 1.
        losses: Losses on held-out text.
        learning: The base's nats per token on new text minus its own.
        forgetting: Its nats per token on old text minus the base's.
    """

    method: str
    rate: float
    rehearses: bool
    parameters: int
    step_seconds: float
    peak_bytes: int
    served_bytes: int
    token_seconds: float
    losses: Losses
    learning: float
    forgetting: float


@dataclass(frozen=True)
class Refused:
    """A method that is not done.

    Attributes:
        method: The method.
        reason: What was in the way.
        is_lasting: True if it would be in the way again, as layers that PEFT does not know, and not as memory that was
            short.
    """

    method: str
    reason: str
    is_lasting: bool


@dataclass(frozen=True)
class Forecast:
    """The steps, samples and seconds of a comparison.

    Attributes:
        steps: Optimizer steps of each method.
        passes: Passes over the text.
        sampled_tokens: Tokens that the base writes.
        seconds: Estimated seconds of all methods that are left, from the speed of a few steps of the base.
    """

    steps: int
    passes: float
    sampled_tokens: int
    seconds: float


@dataclass(frozen=True)
class Base:
    """The scores of the base, and what serving it takes."""

    losses: Losses
    parameters: int
    served_bytes: int
    token_seconds: float


@dataclass(frozen=True)
class Comparison:
    """Methods side by side.

    Attributes:
        model: The base.
        settings: Settings that all methods share.
        machine: Device and versions of libraries.
        read: Sizes and times of the texts and of the base's files.
        base: The base; None until it is measured.
        tries: Learning rates that were tried.
        rows: Methods that are done.
        refused: Methods that are not done, and why.
        seconds: Seconds of all runs of the command.
    """

    model: str
    settings: CompareSettings
    machine: Mapping[str, str]
    read: Mapping[str, Any]
    base: Base | None = None
    tries: tuple[Try, ...] = ()
    rows: tuple[Row, ...] = ()
    refused: tuple[Refused, ...] = ()
    seconds: float = 0.0
    format: Literal[1] = 1

    def continues(self, before: Comparison) -> bool:
        """Return True if an earlier comparison differs at most in its methods, and in what is done."""
        settings = replace(before.settings, methods=self.settings.methods)
        mine = (self.model, self.settings, self.machine, self.read)
        return mine == (before.model, settings, before.machine, before.read)

    @property
    def left(self) -> Iterator[str]:
        """Yield the methods that are still to be trained."""
        done = {row.method for row in self.rows} | {one.method for one in self.refused}
        return (name for name in self.settings.methods if name not in done)

    def adding(self, entry: Try | Row | Refused) -> Comparison:
        """Return the comparison with one more entry."""
        if isinstance(entry, Try):
            return replace(self, tries=(*self.tries, entry))
        if isinstance(entry, Row):
            return replace(self, rows=(*self.rows, entry))
        return replace(self, refused=(*self.refused, entry))

    @property
    def best(self) -> Row | None:
        """Return the row that learned most; None if none learned anything."""
        learned = [row for row in self.rows if row.learning > 0]
        return max(learned, key=lambda row: row.learning, default=None)

    @property
    def choice(self) -> Row | None:
        """Return the row that forgot least of those that learned nearly as much as the best; None if none learned."""
        if (best := self.best) is None:
            return None
        enough = [row for row in self.rows if row.learning >= ENOUGH * best.learning]
        return min(enough, key=lambda row: row.forgetting)

    @property
    def chosen(self) -> str | None:
        """Return the method of `choice`."""
        return None if self.choice is None else self.choice.method

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as plain JSON values, with derived values."""
        content = asdict(self) | {"chosen": self.chosen}
        holders: list[tuple[Any, Any]] = [(entry, self.base)] if (entry := content["base"]) is not None else []
        tried = zip(content["tries"], self.tries, strict=True)
        holders += [(entry, done) for entry, done in tried if done.losses is not None]
        holders += zip(content["rows"], self.rows, strict=True)
        for entry, holder in holders:
            for side in ("old", "new"):
                measured: Measurement = getattr(holder.losses, side)
                entry["losses"][side] |= {"nats_per_token": measured.nats_per_token, "accuracy": measured.accuracy}
        return plain_json(content)
