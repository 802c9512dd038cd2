"""Token sequences in flat arrays: a corpus takes only eight bytes a token in memory."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from scale_surgery.errors import DataError, Problem

# labels of unscored tokens: IGNORED as in torch's cross-entropy, and PROMPT before an answer, which locates the
# answer's first token; `collate` turns both into IGNORED
IGNORED = -100
PROMPT = -101
NOTHING_SCORED = Problem("data-without-scored-tokens")
NO_TEXT = Problem("texts-without-documents", "data")


@dataclass(frozen=True)
class Sequences:
    """Token sequences of any length, one after the other.

    Attributes:
        ids: Token ids of all sequences, int32, (tokens,).
        labels: The same ids, with IGNORED or PROMPT for tokens that are not scored, int32, (tokens,).
        starts: Start of each sequence, and end of the last; (sequences + 1,).
    """

    ids: Tensor
    labels: Tensor
    starts: Sequence[int]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start, end = self.starts[index], self.starts[index + 1]
        return {"input_ids": self.ids[start:end].long(), "labels": self.labels[start:end].long()}

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.ids)

    def some(self, most: int) -> Sequences:
        """Return at most `most` sequences, evenly spread."""
        return self if len(self) <= most else _spread(self, most)

    @property
    def scored(self) -> int:
        """Number of scored tokens; the first of a sequence never is, since nothing predicts it."""
        is_scored = self.labels >= 0
        is_scored[list(self.starts[:-1])] = False
        return int(is_scored.sum())

    @property
    def highest(self) -> int:
        """Highest token id."""
        return int(self.ids.max())

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(end - start for start, end in pairwise(self.starts))

    def fingerprint(self) -> str:
        """Return the sha256 of the tokens, the labels and the lengths of the sequences."""
        digest = Digest()
        digest.add(self)
        return digest.hexdigest()


@dataclass(frozen=True)
class StoredSequences:
    """Token sequences on disk, mapped into memory.

    Attributes:
        rows: A `datasets.Dataset` with the columns "input_ids" and "labels", as tensors.
        scored: Number of scored tokens.
        highest: Highest token id.
        digest: Their `Sequences.fingerprint`.
    """

    rows: Any
    scored: int
    highest: int
    digest: str

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row: dict[str, Tensor] = self.rows[index]
        return row

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return sum(len(chunk.flatten()) for chunk in self.rows.data.column("input_ids").chunks)

    def some(self, most: int) -> Sequences:
        """Load at most `most` sequences into memory, evenly spread."""
        return _spread(self, min(most, len(self)))

    def fingerprint(self) -> str:
        """Return the sha256 of the tokens, the labels and the lengths of the sequences."""
        return self.digest


class Digest:
    """Running sha256 of sequences: of their tokens, their labels and their lengths."""

    def __init__(self) -> None:
        self.digests = [hashlib.sha256() for _ in range(3)]

    def add(self, part: Sequences) -> None:
        """Add some sequences."""
        lengths = torch.tensor(part.starts).diff()
        for digest, flat in zip(self.digests, (part.ids, part.labels, lengths), strict=True):
            digest.update(flat.numpy().data)

    def hexdigest(self) -> str:
        """Return the sha256 of all parts."""
        return hashlib.sha256(b"".join(digest.digest() for digest in self.digests)).hexdigest()


def _spread(sequences: Sequences | StoredSequences, most: int) -> Sequences:
    rows = [sequences[place * len(sequences) // most] for place in range(most)]
    ids, labels = (torch.cat([row[name] for row in rows]).int() for name in ("input_ids", "labels"))
    return Sequences(ids, labels, (0, *accumulate(len(row["input_ids"]) for row in rows)))


def from_arrays(ids: array[int], labels: array[int], starts: Iterable[int]) -> Sequences:
    """Return sequences that share the memory of arrays of 4-byte integers."""
    return Sequences(
        torch.frombuffer(ids, dtype=torch.int32), torch.frombuffer(labels, dtype=torch.int32), tuple(starts)
    )


def concatenate(parts: Iterable[Sequences]) -> Sequences:
    """Join sequences, one after the other."""
    ids, labels, starts = array("i"), array("i"), [0]
    for part in parts:
        starts += [len(ids) + start for start in part.starts[1:]]
        ids.frombytes(part.ids.numpy().tobytes())
        labels.frombytes(part.labels.numpy().tobytes())
    if not ids:
        raise DataError(NO_TEXT)
    return from_arrays(ids, labels, starts)
