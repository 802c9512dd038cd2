"""What both paths of a routed model say of a text, noted in one pass; from it follows what any router would score.

text   --forward pass-->     log-probability of each token on every side, and cosine   `read_paths`
these  --no forward pass-->  loss, accuracy and routed share, whatever the router's numbers   `measure`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from scale_surgery.modeling.expanded_routing import Paths, Tokens, TokenScores, score_tokens
from scale_surgery.progress import Progress, no_progress
from scale_surgery.running.loss import Measurement
from scale_surgery.running.sequences import PROMPT, Sequences
from scale_surgery.running.texts import collate, pad


@dataclass(frozen=True)
class Answers:
    """First tokens of answers, and the weights of the adapt path with which each is the most likely token.

    Attributes:
        row: Row of each in its batch (answers,).
        column: Column of its score.
        least: Smallest such weight.
        most: Largest such weight; below `least` where there is none.
        is_known: Whether the base model gives it the largest logit.
    """

    row: Tensor
    column: Tensor
    least: Tensor
    most: Tensor
    is_known: Tensor

    def answered(self, weight: Tensor) -> Tensor:
        """Whether each is the most likely token (answers,), given weights of the adapt path (b, t - 1)."""
        own = weight[self.row, self.column]
        return (self.least <= own) & (own <= self.most)


@dataclass(frozen=True)
class PathBatch:
    """What both paths say of some windows, on the CPU.

    Attributes:
        scores: Scores of each token but the first (b, t - 1), routed to the base model alone.
        tokens: What a router must know beside them.
        is_scored: Which of them count (b, t - 1).
        answers: First tokens of answers.
        paths: Log-probability of each token but the first on each path of a composed model (b, t - 1, k).
    """

    scores: TokenScores
    tokens: Tokens
    is_scored: Tensor
    answers: Answers
    paths: Tensor | None = None


class Observer:
    """Stands in for a model's router in a forward pass: notes what both paths say, and routes nothing."""

    needs_ids = True

    def __init__(self, router: Any, labels: Tensor) -> None:
        self.router, self.labels = router, labels
        self.batch: PathBatch | None = None

    def logits(self, paths: Paths, tokens: Tokens) -> Tensor:
        """Note what there is; what comes back is read by nobody."""
        assert tokens.ids is not None
        base, preserve, adapt, _, cosine, _ = (part.cpu() for part in score_tokens(self.router, paths, tokens))
        scores = TokenScores(base, preserve, adapt, base, cosine, torch.zeros_like(base))
        self.batch = PathBatch(
            scores,
            Tokens(tokens.ids.cpu(), tokens.restarts.cpu(), None, slice(None)),
            self.labels[:, 1:] >= 0,
            self.find_answers(paths),
        )
        return paths.preserve[:, -1:]

    def find_answers(self, paths: Paths) -> Answers:
        """Compare first tokens of answers with every other token."""
        row, column = ((self.labels[:, :-1] == PROMPT) & (self.labels[:, 1:] >= 0)).nonzero().unbind(1)
        targets = self.labels[row, column + 1].to(paths.preserve.device)
        # one tensor where the paths are one
        preserve = paths.preserve[row, column][None]
        adapt = preserve if paths.adapt is paths.preserve else paths.adapt[row, column][None]
        found, start = [torch.zeros(3, 0, dtype=torch.float64)], 0
        for part in Paths(paths.head, preserve, adapt).chunks(paths.head.weight.shape[0]) if len(row) else ():
            own = targets[start : start + part.preserve.shape[1]]
            found.append(torch.stack(self.compare(part, own)).cpu())
            start += len(own)
        least, most, is_known = torch.cat(found, 1)
        return Answers(row, column, least, most, is_known.bool())

    def compare(self, part: Paths, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`least`, `most` and `is_known` of `Answers`, of some answers; float64."""
        z_p, z_a = part.base_logits()
        is_known = part.head.capped(z_p)[0].argmax(-1) == targets
        side = part.head.capped(self.router.preserve_side(part, z_p, z_a))[0]
        adapt = part.head.capped(part.head.add_up(z_a, part.up()[1]))[0]
        return *winning_weights(side, adapt, targets), is_known.double()


def winning_weights(preserve: Tensor, adapt: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Find the weights of the adapt path with which a token is the most likely one of the mixture.

    What the token is ahead of another is a line over the weight, so each other token bounds the weight from one side.

    Args:
        preserve: Logits of the preserve side (n, v).
        adapt: Logits of the adapt path (n, v).
        targets: Token ids (n,).

    Returns:
        Smallest and largest weight (n,), float64; the largest is below the smallest where there is none.
    """
    at_zero, at_one = (
        likely.gather(1, targets[:, None]) - likely
        for likely in (preserve.double().softmax(-1), adapt.double().softmax(-1))
    )
    slope = at_one - at_zero
    crossing = -at_zero / slope
    least = torch.where(slope > 0, crossing, 0.0).amax(-1).clamp(min=0)
    most = torch.where(slope < 0, crossing, 1.0).amin(-1).clamp(max=1)
    is_behind = ((slope == 0) & (at_zero < 0)).any(-1)
    return least, most.masked_fill(is_behind, -1.0)


def read_paths(
    model: Any, sequences: Sequences, batch_size: int, advance: Progress = no_progress
) -> tuple[PathBatch, ...]:
    """Read token sequences once, the longest first, in the batches of `loss.measure`.

    Args:
        model: A routed model in evaluation mode, on any device; its router is given back.
        sequences: What to read and what to score.
        batch_size: Sequences in one forward pass.
        advance: Called with the tokens done after each pass.

    Returns:
        What both paths say.
    """
    order = reading_order(sequences)
    batches = []
    with torch.no_grad(), _observed(model) as router:
        for start in range(0, len(order), batch_size):
            rows = [sequences[row] for row in order[start : start + batch_size]]
            batches.append(_read_batch(model, router, rows))
            advance(sum(len(row["input_ids"]) for row in rows))
    return tuple(batches)


def reading_order(sequences: Sequences) -> list[int]:
    """Rows in the order in which `read_paths` reads them."""
    return sorted(range(len(sequences)), key=lambda row: sequences.starts[row] - sequences.starts[row + 1])


@contextmanager
def _observed(model: Any) -> Iterator[Any]:
    router = model.router
    try:
        yield router
    finally:
        model.router = router


def _read_batch(model: Any, router: Any, rows: Sequence[Mapping[str, Tensor]]) -> PathBatch:
    batch, device = collate(rows), next(model.parameters()).device
    model.router = observer = Observer(router, pad(rows, "labels"))
    model(**{name: batch[name].to(device) for name in ("input_ids", "attention_mask")}, use_cache=False)
    assert observer.batch is not None
    return observer.batch


@dataclass(frozen=True)
class Reading:
    """What texts score with one setting.

    Attributes:
        total: The sums.
        routed: Sum of the weights of the adapt path over the scored tokens.
        nats: Sum of -log p of each window, or of each text (windows,), float64.
        scored: Scored tokens of each (windows,).
    """

    total: Measurement
    routed: float
    nats: Tensor
    scored: Tensor

    @property
    def nats_per_token(self) -> float:
        """Mean of -log p over the scored tokens."""
        return self.total.nats_per_token

    @property
    def share(self) -> float:
        """Mean weight of the adapt path over the scored tokens."""
        return self.routed / self.total.scored

    def by_text(self, numbers: Sequence[int]) -> Reading:
        """The same with the windows of a text as one: what follows in a text is no new sample.

        Args:
            numbers: Of which text each window is, from 0.
        """
        texts = torch.tensor(numbers)
        nats, scored = (part.new_zeros(max(numbers) + 1).index_add(0, texts, part) for part in (self.nats, self.scored))
        return replace(self, nats=nats, scored=scored)


# how a batch is routed: its scores with what comes out and the weight of the adapt path
Weigh = Callable[[PathBatch], TokenScores]


def base_alone(batch: PathBatch) -> TokenScores:
    """Route everything to the base model."""
    return batch.scores


def adapt_alone(batch: PathBatch) -> TokenScores:
    """Route everything to the adapt path."""
    return batch.scores._replace(routed=batch.scores.adapt, weight=torch.ones_like(batch.scores.adapt))


def routed_by(router: Any) -> Weigh:
    """Route as a model's router does, with any numbers."""
    return lambda batch: router.weigh(batch.scores, batch.tokens)


def measure(batches: Sequence[PathBatch], weigh: Weigh) -> Reading:
    """What texts that were read score.

    Args:
        batches: What both paths say.
        weigh: How they are routed.

    Returns:
        The sums, and those of each window.
    """
    found = [_measure(batch, weigh(batch), is_base=weigh is base_alone) for batch in batches]
    return Reading(
        total=sum((one.total for one in found), Measurement(0.0, 0, 0, 0)),
        routed=sum(one.routed for one in found),
        nats=torch.cat([one.nats for one in found]),
        scored=torch.cat([one.scored for one in found]),
    )


def _measure(batch: PathBatch, scores: TokenScores, *, is_base: bool) -> Reading:
    # what a cosine router gives out on the preserve side is not the base model alone
    answered = batch.answers.is_known if is_base else batch.answers.answered(scores.weight)
    nats = -scores.routed.double().where(batch.is_scored, 0.0).sum(1)
    scored = batch.is_scored.sum(1)
    total = Measurement(float(nats.sum()), int(scored.sum()), len(answered), int(answered.sum()))
    return Reading(total, float(scores.weight[batch.is_scored].double().sum()), nats, scored)


def scored_cosines(batches: Sequence[PathBatch]) -> Tensor:
    """Cosines of both paths' base logits where a scored token is predicted, in ascending order (tokens,)."""
    return torch.cat([batch.scores.cosine[batch.is_scored] for batch in batches]).sort().values
