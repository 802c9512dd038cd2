"""Short prompts: the first tokens of texts, before a router can recognise the text."""

from __future__ import annotations

from itertools import pairwise

import torch

from scale_surgery.errors import DataError, Problem
from scale_surgery.text.sequences import Sequences

# tokens of the longest short prompt
LONGEST = 8


def beginnings(texts: Sequences, known: int) -> Sequences:
    """Return the first tokens of each text, plus one that the longest short prompt predicts; prompts are scored too.

    A beginning ends before a token that the base does not have, `known` or above, because the base cannot predict it.
    """
    ids = [texts.ids[start : min(start + LONGEST + 1, end)] for start, end in pairwise(texts.starts)]
    ids = [some[: int((some < known).cumprod(0).sum())] for some in ids]
    if not any(len(some) > 1 for some in ids):
        raise DataError(Problem("old-begins-with-new-tokens", "--old"))
    starts = torch.tensor([0, *map(len, ids)]).cumsum(0).tolist()
    joined = torch.cat(ids)
    return Sequences(joined, joined, tuple(starts))
