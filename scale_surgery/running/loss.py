"""Loss and first-token accuracy of one model on token sequences; no file is opened here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scale_surgery.checkpoint.records import open_record
from scale_surgery.progress import Progress, no_progress
from scale_surgery.running.processes import shared_out

if TYPE_CHECKING:
    from accelerate import PartialState
    from torch import Tensor

    from scale_surgery.text.sequences import Sequences

# logits that are taken to float32 at a time: 64 MiB, whatever the size of the batch and of the vocabulary
LOGITS_AT_ONCE = 2**24


@open_record  # its JSON also has what follows from the sums
@dataclass(frozen=True)
class Measurement:
    """Score of a model; measurements on parts of a text add up.

    Attributes:
        nats: Sum of -log p over the scored tokens.
        scored: Number of scored tokens.
        questions: Answers whose first token was predicted from a prompt.
        answered: Answers whose first token had the largest logit.
        bytes: Bytes of the texts that were scored; 0 where nobody counted them.
    """

    nats: float
    scored: int
    questions: int
    answered: int
    bytes: int = 0

    def __add__(self, other: Measurement) -> Measurement:
        return Measurement(
            self.nats + other.nats,
            self.scored + other.scored,
            self.questions + other.questions,
            self.answered + other.answered,
            self.bytes + other.bytes,
        )

    @property
    def nats_per_token(self) -> float:
        """Mean of -log p over the scored tokens; NaN where there are none."""
        return self.nats / self.scored if self.scored else math.nan

    def loss_against(self, base: Measurement) -> float:
        """How much worse the same text is predicted, in nats per token; where the tokens are others, of the base's."""
        if self.scored == base.scored:
            return self.nats_per_token - base.nats_per_token
        return (self.nats - base.nats) / base.scored

    @property
    def bits_per_byte(self) -> float | None:
        """Sum of -log2 p over the bytes of the texts, which do not depend on the tokenizer; None without a count."""
        return self.nats / math.log(2) / self.bytes if self.bytes else None

    @property
    def perplexity(self) -> float:
        """Exponential of nats per token."""
        try:
            return math.exp(self.nats_per_token)
        except OverflowError:
            return math.inf

    @property
    def accuracy(self) -> float | None:
        """Share of questions answered, from 0 to 1; None where there are none."""
        return self.answered / self.questions if self.questions else None


def measure(
    model: Any,
    sequences: Sequences,
    batch_size: int,
    advance: Progress = no_progress,
    processes: PartialState | None = None,
) -> Measurement:
    """Score a causal model on token sequences, the longest first, in several processes batch by batch."""
    import torch

    order = reading_order(sequences)
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]

    def score(batch: list[int]) -> Measurement:
        rows = [sequences[row] for row in batch]
        scored = _measure_batch(model, rows)
        # the others have read as many
        advance(sum(len(row["input_ids"]) for row in rows) * (1 if processes is None else processes.num_processes))
        return scored

    with torch.no_grad(), evaluating(model):
        # batches, and the order in which they are added, are those of one process
        return sum(shared_out(batches, score, processes), Measurement(0.0, 0, 0, 0))


def reading_order(sequences: Sequences) -> list[int]:
    """Rows, the longest first: memory runs out at once or not at all, and equal lengths need no padding."""
    return sorted(range(len(sequences)), key=lambda row: sequences.starts[row] - sequences.starts[row + 1])


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Run a model without dropout; every module gets back the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _measure_batch(model: Any, rows: Sequence[dict[str, Tensor]]) -> Measurement:
    from scale_surgery.text.tokenizing import collate, pad

    batch = collate(rows)
    device = next(model.parameters()).device
    inputs = {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    labels = pad(rows, "labels")
    scored = (labels[:, 1:] >= 0).nonzero()
    tokens_at_once = max(1, LOGITS_AT_ONCE // logits.shape[-1])
    total = Measurement(0.0, 0, 0, 0)
    for start in range(0, len(scored), tokens_at_once):
        total += _measure_tokens(logits, labels, *scored[start : start + tokens_at_once].unbind(1))
    return total


def _measure_tokens(logits: Tensor, labels: Tensor, row: Tensor, column: Tensor) -> Measurement:
    """Score the tokens that stand after `column` in `row`; both (tokens,)."""
    from torch.nn import functional

    from scale_surgery.text.sequences import PROMPT

    chosen = logits[row.to(logits.device), column.to(logits.device)].float()  # (tokens, v)
    targets = labels[row, column + 1].to(logits.device)
    nats = functional.cross_entropy(chosen, targets, reduction="none")
    is_first = (labels[row, column] == PROMPT).to(logits.device)
    answered = chosen[is_first].argmax(-1) == targets[is_first]
    # float64 is not there on every device
    return Measurement(float(nats.cpu().double().sum()), len(row), len(answered), int(answered.sum()))
