"""Texts on which a mixture of paths may lose, and its loss on each: prompts, texts of the paths, joined halves."""

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

# texts that each path writes, how they begin, and how long they are, in tokens
WRITTEN, BEGINNING, LENGTH = 2, 4, 24


@dataclass(frozen=True)
class HostileTexts:
    """Token ids (texts, t), the name of each text, and the attention mask (texts, t)."""

    ids: Tensor
    names: tuple[str, ...]
    mask: Tensor


def prompt_texts(batch: Batch) -> HostileTexts:
    """The prompts, in one left-padded batch: padding is no evidence."""
    return HostileTexts(batch.ids, tuple(f"prompt {number}" for number in range(1, len(batch.ids) + 1)), batch.mask)


def hostile_texts(model: Any, batch: Batch, device: str, *, write: bool) -> Iterator[HostileTexts]:
    """Texts that each path writes greedily, and joined halves of two, in which the trusted path goes wrong."""
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
    """The first tokens of some prompts (texts, t), as many of each."""
    rows = [ids[mask] for ids, mask in zip(batch.ids, batch.mask.bool(), strict=True)][:WRITTEN]
    size = min(BEGINNING, *map(len, rows), len(rows[0]))
    return torch.stack([row[:size] for row in rows])


def _write(model: Any, begun: Tensor, length: int) -> Tensor:
    """Greedy continuation to a length in tokens, without an end of text."""
    inputs = {"input_ids": begun, "attention_mask": torch.ones_like(begun)}
    return continue_greedily(model, inputs, length - begun.shape[1]).cpu()


@torch.no_grad()
def excess(model: Any, texts: HostileTexts, device: str) -> Iterator[tuple[str, float]]:
    """Loss of the mixture on each text, in nats above the base; with several expansions, above the best path."""
    ids, mask = texts.ids.to(device), texts.mask.to(device)
    paths = model.path_logits(ids, attention_mask=mask)
    best = torch.stack([_losses(logits, ids, mask) for logits in paths[: 1 if len(paths) == 2 else None]]).amin(0)
    lost = _losses(model(ids, attention_mask=mask, use_cache=False).logits, ids, mask) - best
    yield from zip(texts.names, lost.tolist(), strict=True)


def _losses(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Sum of -log p over the tokens of each text but its first, in nats, float64."""
    # logits of half precision are rounded so far that float64 would add nothing but time
    exact = torch.float32 if logits.dtype.itemsize < 4 else torch.float64
    # one text at a time: logits over a wide vocabulary are large
    losses = [
        -row[:-1].to(exact).log_softmax(-1).gather(-1, read[1:, None]).squeeze(-1).double()
        for row, read in zip(logits, ids, strict=True)
    ]
    return torch.stack(losses).masked_fill(mask[:, :-1] == 0, 0).sum(-1)
