"""Loss and first-token accuracy of a model on token sequences. No file is opened here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scale_surgery.checkpoint.records import open_record
from scale_surgery.progress import Progress, no_progress
from scale_surgery.running.pieces import Pieces, Tail, find_tail, in_pieces, pieces_of_logits
from scale_surgery.running.processes import shared_out

if TYPE_CHECKING:
    from accelerate import PartialState
    from torch import Tensor

    from scale_surgery.text.sequences import Sequences


@open_record  # its JSON also has derived values
@dataclass(frozen=True)
class Measurement:
    """A score of a model. Measurements on parts of a text can be added.

    Attributes:
        nats: Sum of -log p over the scored tokens.
        scored: Number of scored tokens.
        questions: Answers whose first token was predicted from a prompt.
        answered: Answers whose first token had the largest logit.
        bytes: Bytes of the scored texts; 0 if they were not counted.
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
        """Mean of -log p over the scored tokens, in nats; NaN if there are none."""
        return self.nats / self.scored if self.scored else math.nan

    def loss_against(self, base: Measurement) -> float:
        """Return the increase of the loss on the same text over the base, in nats per token.

        If the models tokenize differently, it is per token of the base.
        """
        if self.scored == base.scored:
            return self.nats_per_token - base.nats_per_token
        return (self.nats - base.nats) / base.scored

    @property
    def bits_per_byte(self) -> float | None:
        """Sum of -log2 p per byte of text, independent of the tokenizer, or None without a byte count."""
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
        """Share of questions with the right first token, from 0 to 1, or None if there are no questions."""
        return self.answered / self.questions if self.questions else None


def measure(
    model: Any,
    sequences: Sequences,
    batch_size: int,
    advance: Progress = no_progress,
    processes: PartialState | None = None,
) -> Measurement:
    """Score a causal model on token sequences, the longest first. Several processes share the batches."""
    import torch

    order = reading_order(sequences)
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]

    def score(batch: list[int]) -> Measurement:
        rows = [sequences[row] for row in batch]
        scored = _measure_batch(model, tail, rows)
        # the other processes have read about as many
        advance(sum(len(row["input_ids"]) for row in rows) * (1 if processes is None else processes.num_processes))
        return scored

    with torch.no_grad(), evaluating(model):
        tail = find_tail(model, sequences[order[0]]["input_ids"]) if order else None
        # batches and their order of addition do not depend on the number of processes
        return sum(shared_out(batches, score, processes), Measurement(0.0, 0, 0, 0))


def reading_order(sequences: Sequences) -> list[int]:
    """Return the rows, the longest first: memory runs out at once or never, and equal lengths need no padding."""
    return sorted(range(len(sequences)), key=lambda row: sequences.starts[row] - sequences.starts[row + 1])


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Put a model into evaluation mode inside a `with` block, and restore the mode of every module."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _measure_batch(model: Any, tail: Tail | None, rows: Sequence[dict[str, Tensor]]) -> Measurement:
    from torch.nn.functional import pad as pad_tensor

    from scale_surgery.text.sequences import IGNORED, PROMPT
    from scale_surgery.text.tokenizing import collate, pad

    batch, labels = collate(rows), pad(rows, "labels")
    device = next(model.parameters()).device
    inputs = {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}
    following = pad_tensor(labels[:, 1:], (0, 1), value=IGNORED)
    # the last token of a prompt predicts the first token of its answer
    asks = labels == PROMPT
    measured: list[Measurement] = []

    def finish(pieces: Pieces) -> Tensor:
        targets, questions = pieces.pick(following), pieces.pick(asks)
        for positions in pieces.slices:
            logits = pieces.logits(pieces.hidden[:, positions], positions)
            scored = targets[:, positions] >= 0
            chosen = logits.flatten(0, 1) if pieces.wanted is not None else logits[scored]
            measured.append(_measure_tokens(chosen, targets[:, positions][scored], questions[:, positions][scored]))
        return pieces.hidden.new_zeros(())

    if tail is None:
        finish(pieces_of_logits(model(**inputs, use_cache=False).logits, following >= 0))
    else:
        with in_pieces(model, tail, inputs, following >= 0, finish):
            model(**inputs, use_cache=False)
    return sum(measured, Measurement(0.0, 0, 0, 0))


def _measure_tokens(logits: Tensor, targets: Tensor, questions: Tensor) -> Measurement:
    """Score target tokens by the logits that predict them (tokens, v). `questions` marks first tokens of answers."""
    from torch.nn import functional

    logits = logits.float()
    nats = functional.cross_entropy(logits, targets, reduction="none")
    answered = logits[questions].argmax(-1) == targets[questions]
    # not every device supports float64
    return Measurement(float(nats.cpu().double().sum()), len(targets), len(answered), int(answered.sum()))
