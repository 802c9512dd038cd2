"""Short prompts: continuations of the first tokens of texts, before a router can recognise the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from scale_surgery.routing.outcome import ShortPrompt, ShortPrompts, mean_with_error
from scale_surgery.routing.path_scores import PathBatch, Weigh, weight_of
from scale_surgery.text.sequences import Sequences

# tokens of the longest short prompt
LONGEST = 8


@dataclass(frozen=True)
class Beginnings:
    """Each short prompt with one setting; tensors are (texts, LONGEST), zero after the end of a shorter text.

    Attributes:
        is_read: True if there is a next token.
        lost: Loss on it minus that of the base, nats, float64.
        weight: Weight of all paths but the base's there, float64.
    """

    is_read: Tensor
    lost: Tensor
    weight: Tensor


def beginnings(texts: Sequences) -> Sequences:
    """Return the first tokens of each text, plus one that the longest short prompt predicts; prompts are scored too."""
    ids = [texts.ids[start : min(start + LONGEST + 1, end)] for start, end in pairwise(texts.starts)]
    starts = torch.tensor([0, *map(len, ids)]).cumsum(0).tolist()
    joined = torch.cat(ids)
    return Sequences(joined, joined, tuple(starts))


def read_beginnings(batches: Sequence[PathBatch], weigh: Weigh) -> Beginnings:
    """Route short prompts."""
    parts = []
    for batch in batches:
        scores, is_read = weigh(batch), batch.is_scored
        values = torch.stack((is_read, scores.base - scores.routed, weight_of(scores))).double().where(is_read, 0.0)
        parts.append(torch.nn.functional.pad(values, (0, LONGEST - is_read.shape[1])))
    is_read, lost, weight = torch.cat(parts, 1)
    return Beginnings(is_read > 0, lost, weight)


def summarise_prompts(beginnings: Beginnings, present: Beginnings) -> ShortPrompts:
    """Return the means of short prompts by length and over all, and their change against the present setting."""
    texts = beginnings.is_read.sum(0).tolist()
    sums = zip(texts, beginnings.weight.sum(0).tolist(), beginnings.lost.sum(0).tolist(), strict=True)
    lengths = tuple(
        ShortPrompt(tokens, count, weight / count, lost / count)
        for tokens, (count, weight, lost) in enumerate(sums, start=1)
        if count
    )
    # the next token is from an old text, which the base knows, so the mean loss against the base estimates
    # KL(base || routed)
    change = mean_with_error((beginnings.lost - present.lost).sum(1), beginnings.is_read.sum(1))
    return ShortPrompts(lengths, float(beginnings.lost.sum()) / sum(texts), change)
