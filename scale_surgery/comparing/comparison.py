"""The result of a comparison, which is also its record in compare.json."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from scale_surgery.checkpoint.files import plain_json
from scale_surgery.comparing.settings import CompareSettings
from scale_surgery.running.loss import Measurement

# nats per token from which on a difference counts
MARGIN = 0.01


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

    @property
    def gain(self) -> float:
        """Learning minus forgetting: by how much the sum of both losses is below the base's."""
        return self.learning - self.forgetting


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
        seconds: Estimated seconds of samples and methods that are left, by the speed of the base.
        begun: How the samples begin; empty if it is with the token that starts a text, or nothing is left to sample.
    """

    steps: int
    passes: float
    sampled_tokens: int
    seconds: float
    begun: str = ""


@dataclass(frozen=True)
class Base:
    """The scores of the base, the seconds in which it reads a batch, and what serving it takes."""

    losses: Losses
    batch_seconds: float
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
        begun: How own samples begin, and what was left out or cut; empty if it is with the token that starts a text.
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
    begun: str = ""
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
    def choice(self) -> Row | None:
        """Return the row with the lowest sum of the losses on old and new text; None if the base's is as low."""
        best = max(self.rows, key=lambda row: row.gain, default=None)
        return best if best is not None and best.gain > MARGIN else None

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
