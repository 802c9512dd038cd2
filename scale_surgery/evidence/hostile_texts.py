"""Texts on which a mixture of paths may lose: prompts, texts of the paths, joined halves; and its loss on each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from scale_surgery.checkpoint.expansions import BASE_NAME
from scale_surgery.running.context import context_of
from scale_surgery.running.own_generation import continue_greedily
from scale_surgery.running.prompts import Batch

# number of texts per path; tokens of their prompts, and tokens in all
WRITTEN, BEGINNING, LENGTH = 2, 4, 24


@dataclass(frozen=True)
class HostileTexts:
    """Token ids (texts, t), the name of each text, and the attention mask (texts, t)."""

    ids: Tensor
    names: tuple[str, ...]
    mask: Tensor


def prompt_texts(batch: Batch) -> HostileTexts:
    """Return the prompts as one left-padded batch; padding is no evidence for a router."""
    return HostileTexts(batch.ids, tuple(f"prompt {number}" for number in range(1, len(batch.ids) + 1)), batch.mask)


def hostile_texts(model: Any, batch: Batch, device: str, *, write: bool) -> Iterator[HostileTexts]:
    """Generate texts written greedily by each path, and joined halves of two, which make the trusted path wrong."""
    begun = _beginnings(batch)
    length = min(LENGTH, context_of(model.config.get_text_config()) or LENGTH)
    if not write or length - begun.shape[1] < 1:
        return
    written = []
    for name in (None, *model.expansions):
        with model.use_expansion(name):
            ids = _write(model, begun.to(device), length)
            written.append(_whole(ids, f"written by {name or BASE_NAME}"))
    yield from _numbered(written)
    pairs = [pair for first, second in pairwise(written) for pair in ((first, second), (second, first))]
    half = length // 2
    joined = [torch.cat((first.ids[:, :half], second.ids[:, half:]), 1) for first, second in pairs]
    names = [f"{first.names[0]}, then {second.names[0]}" for first, second in pairs]
    yield from _numbered([_whole(ids, name) for ids, name in zip(joined, names, strict=True)])


def _whole(ids: Tensor, name: str) -> HostileTexts:
    return HostileTexts(ids, (name,) * len(ids), torch.ones_like(ids))


def _numbered(texts: Sequence[HostileTexts]) -> Iterator[HostileTexts]:
    for batch in texts:
        yield replace(batch, names=tuple(f"{name} ({number})" for number, name in enumerate(batch.names, 1)))


def _beginnings(batch: Batch) -> Tensor:
    """Return the first tokens of some prompts (texts, t), equally many of each."""
    rows = [ids[mask] for ids, mask in zip(batch.ids, batch.mask.bool(), strict=True)][:WRITTEN]
    size = min(BEGINNING, *map(len, rows), len(rows[0]))
    return torch.stack([row[:size] for row in rows])


def _write(model: Any, begun: Tensor, length: int) -> Tensor:
    """Return the greedy continuation up to a length in tokens, ignoring the end of a text."""
    inputs = {"input_ids": begun, "attention_mask": torch.ones_like(begun)}
    return continue_greedily(model, inputs, length - begun.shape[1]).cpu()


@torch.no_grad()
def excess(model: Any, texts: HostileTexts, device: str) -> Iterator[tuple[str, float, float]]:
    """Generate the loss of the mixture on each text, in nats above the base, or above the best of several paths.

    It is that of the logits, and that of the router's own float32 numbers, before they are rounded to logits.
    """
    ids, mask = texts.ids.to(device), texts.mask.to(device)
    paths = model.path_logits(ids, attention_mask=mask)
    best = torch.stack([_losses(logits, ids, mask) for logits in paths[: 1 if len(paths) == 2 else None]]).amin(0)
    lost = _losses(model(ids, attention_mask=mask, use_cache=False).logits, ids, mask) - best
    scores = model.score_tokens(ids, attention_mask=mask)
    known = scores.base[..., None] if len(paths) == 2 else scores.sides
    own = _sums(known, mask).amax(-1) - _sums(scores.routed[..., None], mask)[:, 0]
    yield from zip(texts.names, lost.tolist(), own.tolist(), strict=True)


def _sums(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return the sums over the tokens of each text (texts, k) of log-probabilities (texts, t - 1, k)."""
    return log_probs.double().masked_fill(mask[:, :-1, None] == 0, 0).sum(1)


def _losses(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of -log p over the tokens of each text but its first, in nats, float64."""
    # logits in half precision are so coarse that float64 would only cost time
    exact = torch.float32 if logits.dtype.itemsize < 4 else torch.float64
    # one text at a time, because logits over a large vocabulary need much memory
    losses = [
        -row[:-1].to(exact).log_softmax(-1).gather(-1, read[1:, None]).squeeze(-1).double()
        for row, read in zip(logits, ids, strict=True)
    ]
    return torch.stack(losses).masked_fill(mask[:, :-1] == 0, 0).sum(-1)
