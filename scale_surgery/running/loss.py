"""Loss and first-token accuracy of one model on token sequences; no file is opened here."""

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
        scored = _measure_batch(model, tail, rows)
        # the others have read as many
        advance(sum(len(row["input_ids"]) for row in rows) * (1 if processes is None else processes.num_processes))
        return scored

    with torch.no_grad(), evaluating(model):
        tail = find_tail(model, sequences[order[0]]["input_ids"]) if order else None
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


def _measure_batch(model: Any, tail: Tail | None, rows: Sequence[dict[str, Tensor]]) -> Measurement:
    from torch.nn.functional import pad as pad_tensor

    from scale_surgery.text.sequences import IGNORED, PROMPT
    from scale_surgery.text.tokenizing import collate, pad

    batch, labels = collate(rows), pad(rows, "labels")
    device = next(model.parameters()).device
    inputs = {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}
    following = pad_tensor(labels[:, 1:], (0, 1), value=IGNORED)
    # a prompt's last token predicts the first of its answer
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
    """Score tokens by the logits before them (tokens, v); a question asks for the token."""
    from torch.nn import functional

    logits = logits.float()
    nats = functional.cross_entropy(logits, targets, reduction="none")
    answered = logits[questions].argmax(-1) == targets[questions]
    # float64 is not there on every device
    return Measurement(float(nats.cpu().double().sum()), len(targets), len(answered), int(answered.sum()))
