"""Scores of all paths of a model on a text, from one forward pass; they determine the loss of any router.

text    --forward pass-->     log-probability of each token on every path, and the router's input  `read_paths`
scores  --no forward pass-->  loss, accuracy and routed share, for any numbers of the router       `measure_batches`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from scale_surgery.modeling.expanded_routing import TokenScores, row_cosines, weigh
from scale_surgery.progress import Progress, no_progress
from scale_surgery.routing.watched import Observer, observed_by
from scale_surgery.running.loss import Measurement, reading_order
from scale_surgery.text.sequences import PROMPT, Sequences
from scale_surgery.text.tokenizing import collate, pad

# most numbers of a batch; each batch is processed step by step over its longest window
BATCH_NUMBERS = 2**22


@dataclass(frozen=True)
class Answers:
    """First tokens of answers, with the weights of the second of two paths for which each is the most likely token.

    Attributes:
        row: Row of each in its batch (answers,).
        column: Column of its score.
        least: Smallest such weight.
        most: Largest such weight; below `least` if there is none.
        is_known: True if the base model gives it the largest logit.
    """

    row: Tensor
    column: Tensor
    least: Tensor
    most: Tensor
    is_known: Tensor

    def answered(self, weight: Tensor) -> Tensor:
        """Return True for each most likely token (answers,), given weights of the second path (b, t - 1)."""
        answer_weight = weight[self.row, self.column]
        return (self.least <= answer_weight) & (answer_weight <= self.most)


def joined_answers(parts: Sequence[Answers], rows: Sequence[int] | None = None) -> Answers:
    """Join the answers of several parts."""
    moved = [0] * len(parts) if rows is None else rows
    parts = [replace(part, row=part.row + first) for part, first in zip(parts, moved, strict=True)]
    if not parts:
        none = torch.zeros(0)
        return Answers(none.long(), none.long(), none, none, none.bool())
    return Answers(*(torch.cat([getattr(part, name) for part in parts]) for name in Answers.__dataclass_fields__))


@dataclass(frozen=True)
class PathBatch:
    """Scores of all paths on some windows, on the CPU.

    Attributes:
        scores: Scores of each token but the first (b, t - 1), routed by the model's own router.
        is_scored: True for scores that count (b, t - 1).
        answers: First tokens of answers; empty if there are more than two paths.
    """

    scores: TokenScores
    is_scored: Tensor
    answers: Answers


class PathObserver(Observer):
    """An observer of the cosine of two paths, and of the weights for which first tokens of answers are the most likely.

    With more paths these weights are no interval, so answers are recorded for two paths only.
    """

    def __init__(self, router: Any, labels: Tensor) -> None:
        super().__init__(router)
        self.labels, self.done = labels, 0
        self.answers: list[Answers] = []

    def read_logits(self, features: Any) -> tuple[list[Tensor], Tensor | None]:
        """Return the input of the router, and for two paths the cosine of their base logits."""
        sides, observed = self.router.read_logits(features)
        start, self.done = self.done, self.done + sides[0].shape[1]
        if len(sides) != 2:
            return sides, observed
        row, column = self._first_tokens(start)
        if len(row):
            self.answers.append(self._compare(features, sides, row, column, start))
        if observed is None:
            bases = features.base_logits()
            observed = row_cosines(bases[0], bases[-1])
        return sides, observed

    def _first_tokens(self, start: int) -> tuple[Tensor, Tensor]:
        """Return rows and columns of the answers that are scored in this step."""
        is_first = (self.labels[:, :-1] == PROMPT) & (self.labels[:, 1:] >= 0)
        is_first[:, :start] = is_first[:, self.done :] = False
        row, column = is_first.nonzero().unbind(1)
        return row, column

    def _compare(self, features: Any, sides: list[Tensor], row: Tensor, column: Tensor, start: int) -> Answers:
        """Compare first tokens of answers with every other token."""
        device = sides[0].device
        targets, place = self.labels[row, column + 1].to(device), (row.to(device), (column - start).to(device))
        first, second = (side[place] for side in sides)
        is_base = features.paths[0].up is None
        base = first if is_base else features.of_base()[place]
        least, most = winning_weights(first, second, targets)
        return Answers(row, column, least.cpu(), most.cpu(), (base.argmax(-1) == targets).cpu())


def winning_weights(first: Tensor, second: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest weight of the second path for which each target is the most likely token."""
    # logits are (n, v), targets (n,), weights (n,) in float64; the largest is below the smallest if there is none
    at_zero, at_one = (
        likely.gather(1, targets[:, None]) - likely
        for likely in (first.double().softmax(-1), second.double().softmax(-1))
    )
    # the lead of a token over another is linear in the weight, so each other token bounds the weight from one side
    slope = at_one - at_zero
    crossing = -at_zero / slope
    least = torch.where(slope > 0, crossing, 0.0).amax(-1).clamp(min=0)
    most = torch.where(slope < 0, crossing, 1.0).amin(-1).clamp(max=1)
    # of equals, the first is the most likely
    is_earlier = torch.arange(first.shape[-1], device=targets.device) < targets[:, None]
    is_behind = ((slope == 0) & ((at_zero < 0) | ((at_zero == 0) & is_earlier))).any(-1)
    return least, most.masked_fill(is_behind, -1.0)


def read_paths(
    model: Any, sequences: Sequences, batch_size: int, advance: Progress = no_progress
) -> tuple[PathBatch, ...]:
    """Read token sequences once, in the order of `reading_order`, in the batches of `loss.measure`."""
    order = reading_order(sequences)
    batches = []
    for start in range(0, len(order), batch_size):
        rows = [sequences[row] for row in order[start : start + batch_size]]
        batches.append(_read_batch(model, rows))
        advance(sum(len(row["input_ids"]) for row in rows))
    return tuple(_joined(batches))


def _read_batch(model: Any, rows: Sequence[Mapping[str, Tensor]]) -> PathBatch:
    batch, labels, device = collate(rows), pad(rows, "labels"), next(model.parameters()).device
    observer = PathObserver(model.choice.router, labels)
    with observed_by(model, observer):
        scores = model.score_tokens(**{name: batch[name].to(device) for name in ("input_ids", "attention_mask")})
    return PathBatch(
        _scores_of([scores], lambda parts: parts[0].cpu()), labels[:, 1:] >= 0, joined_answers(observer.answers)
    )


def _scores_of(scores: Sequence[TokenScores], make: Callable[[Sequence[Tensor]], Tensor]) -> TokenScores:
    """Combine scores field by field; their class may come from the model's folder."""
    *numbers, observed = zip(*scores, strict=True)
    base, sides, weights, routed = map(make, numbers)
    return TokenScores(base, sides, weights, routed, None if observed[0] is None else make(observed))


def _joined(batches: Sequence[PathBatch]) -> Iterator[PathBatch]:
    """Join consecutive batches, whose windows become ever shorter."""
    group: list[PathBatch] = []
    for batch in batches:
        windows = sum(len(item.is_scored) for item in (*group, batch))
        if group and windows * group[0].scores.sides[0].numel() > BATCH_NUMBERS:
            yield _join(group)
            group = []
        group.append(batch)
    if group:
        yield _join(group)


def _join(batches: Sequence[PathBatch]) -> PathBatch:
    def whole(parts: Sequence[Tensor]) -> Tensor:
        return pad_sequence([row for part in parts for row in part], batch_first=True)

    firsts = [sum(len(item.is_scored) for item in batches[:number]) for number in range(len(batches))]
    return PathBatch(
        _scores_of([batch.scores for batch in batches], whole),
        whole([batch.is_scored for batch in batches]),
        joined_answers([batch.answers for batch in batches], firsts),
    )


@dataclass(frozen=True)
class PathLosses:
    """Losses of texts with one setting.

    Attributes:
        total: The sums.
        routed: Sum of the weights of all paths but the base's over the scored tokens.
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
        """Mean weight of all paths but the base's over the scored tokens."""
        return self.routed / self.total.scored

    def by_text(self, numbers: Sequence[int]) -> PathLosses:
        """Return the losses with all windows of a text as one, since they are not independent samples."""
        texts = torch.tensor(numbers)
        nats, scored = (part.new_zeros(max(numbers) + 1).index_add(0, texts, part) for part in (self.nats, self.scored))
        return replace(self, nats=nats, scored=scored)


# a routing: returns a batch's scores with routed output and weights of the paths
Weigh = Callable[[PathBatch], TokenScores]


def routed_by(router: Any) -> Weigh:
    """Return the routing of a router with the same paths and any numbers."""

    def by_router(batch: PathBatch) -> TokenScores:
        scores = batch.scores
        restarts = torch.zeros(len(scores.base), scores.base.shape[1] + 1, dtype=torch.bool)
        restarts[:, 0] = True
        return weigh(router, scores.base, scores.sides, restarts, scores.observed)

    return by_router


def weigh_base(batch: PathBatch) -> TokenScores:
    """Route everything to the base model."""
    # the preserve side of a cosine router may include an up stream
    return _alone(batch, torch.zeros(len(batch.is_scored), dtype=torch.long))._replace(routed=batch.scores.base)


def adapt_alone(batch: PathBatch) -> TokenScores:
    """Route everything to the last path."""
    last = batch.scores.sides.shape[-1] - 1
    return _alone(batch, torch.full((len(batch.is_scored),), last))


def best_alone(batch: PathBatch) -> TokenScores:
    """Route each window to the path that predicts it best."""
    return _alone(batch, best_of(batch))


def _alone(batch: PathBatch, numbers: Tensor) -> TokenScores:
    """Route each window to the path of its number (windows,)."""
    sides, places = batch.scores.sides, numbers[:, None, None].expand(-1, batch.scores.sides.shape[1], 1)
    weights = torch.zeros_like(sides).scatter(-1, places, 1.0)
    return batch.scores._replace(weights=weights, routed=sides.gather(-1, places)[..., 0])


def best_of(batch: PathBatch, first: int = 0) -> Tensor:
    """Return the path that predicts each window best (windows,), among those from a number on."""
    sides = batch.scores.sides[..., first:].double()
    return first + sides.where(batch.is_scored[..., None], 0.0).sum(1).argmax(-1)


def weight_of(scores: TokenScores) -> Tensor:
    """Return the weight of all paths but the base's (b, t - 1)."""
    return scores.weights[..., 1:].sum(-1)


def measure_batches(batches: Sequence[PathBatch], weigh: Weigh) -> PathLosses:
    """Return the losses of texts with one routing."""
    parts = [_measure(batch, weigh(batch), is_base=weigh is weigh_base) for batch in batches]
    return PathLosses(
        total=sum((part.total for part in parts), Measurement(0.0, 0, 0, 0)),
        routed=sum(part.routed for part in parts),
        nats=torch.cat([part.nats for part in parts]),
        scored=torch.cat([part.scored for part in parts]),
    )


def _measure(batch: PathBatch, scores: TokenScores, *, is_base: bool) -> PathLosses:
    weight = weight_of(scores)
    answered = batch.answers.is_known if is_base else batch.answers.answered(weight)
    nats = -scores.routed.double().where(batch.is_scored, 0.0).sum(1)
    scored = batch.is_scored.sum(1)
    total = Measurement(float(nats.sum()), int(scored.sum()), len(answered), int(answered.sum()))
    return PathLosses(total, float(weight[batch.is_scored].double().sum()), nats, scored)


def scored_cosines(batches: Sequence[PathBatch]) -> Tensor:
    """Return the cosines of both paths' base logits at the predictions of scored tokens, ascending (tokens,)."""
    observed = [(batch.scores.observed, batch.is_scored) for batch in batches]
    return torch.cat([cosine[is_scored] for cosine, is_scored in observed if cosine is not None]).sort().values
