"""Probe prompts as token ids: compared models read the same ids in one left-padded batch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scale_surgery.checkpoint.reading import read_bytes
from scale_surgery.errors import CheckpointError, Problem
from scale_surgery.running.context import context_of
from scale_surgery.running.loading import load_config
from scale_surgery.running.options import Probes, RunOptions
from scale_surgery.running.tokenizer import load_tokenizer

PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a",
    "def fibonacci(n):\n    ",
    "Q: How many legs does a spider have?\nA:",
    "1, 2, 4, 8, 16,",
    "Der schnelle braune Fuchs",
    "東京は日本の",
    "Water boils at",
)
MAX_PROMPT_TOKENS = 48
MAX_PROMPTS = 64
# number of prompts of random ids, for a model without a tokenizer
NUM_RANDOM_PROMPTS = 4


@dataclass(frozen=True)
class Batch:
    """A batch of probe prompts: left-padded token ids and their attention mask, both (prompts, tokens)."""

    ids: Tensor
    mask: Tensor

    def inputs(self, device: str | torch.device) -> dict[str, Tensor]:
        """Return the inputs of a model on a device."""
        return {"input_ids": self.ids.to(device), "attention_mask": self.mask.to(device)}

    def two(self) -> Batch:
        """Return the longest and the shortest prompt: one without padding, and one with the most."""
        lengths = self.mask.sum(1)
        rows = torch.stack((lengths.argmax(), lengths.argmin()))
        return Batch(self.ids[rows], self.mask[rows])


@dataclass(frozen=True)
class EncodedPrompts:
    """The probe prompts as token ids. Random ids replace them if no tokenizer loads."""

    prompts: tuple[str, ...]
    tokenizer: Any | None
    batch: Batch


def encode_prompts(path: Path, probes: Probes, run: RunOptions, tokenizer: Any = None) -> EncodedPrompts:
    """Encode prompts as the token ids of a model, by its own tokenizer or by a given one."""
    prompts = read_prompts(probes.prompts_file)
    tokenizer = load_tokenizer(path, run) if tokenizer is None else tokenizer
    config = load_config(path, path.name, run)
    return EncodedPrompts(prompts, tokenizer, _make_batch(tokenizer, prompts, config, probes.max_new_tokens))


def read_prompts(file: Path | None) -> tuple[str, ...]:
    """Read the prompts of a text file, one per line. Without a file, return the built-in prompts."""
    if file is None:
        return PROMPTS
    try:
        # as in texts: no other character ends a line
        lines = re.split(r"\r\n|\r|\n", read_bytes(file).decode("utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(Problem("text-unreadable", file, error=error)) from error
    prompts = tuple(line for line in lines if line.strip())
    if len(prompts) > MAX_PROMPTS:
        raise CheckpointError(Problem("prompts-too-many", file, prompts=len(prompts), most=MAX_PROMPTS))
    if not prompts:
        raise CheckpointError(Problem("file-without-prompts", file))
    return prompts


def _make_batch(tokenizer: Any | None, prompts: Sequence[str], config: Any, new_tokens: int) -> Batch:
    """Encode prompts as one left-padded batch. Without a tokenizer, the ids are random, with a fixed seed."""
    context = context_of(config) or 2 * MAX_PROMPT_TOKENS + new_tokens
    limit = min(MAX_PROMPT_TOKENS, context // 2, context - new_tokens)
    if limit < 1:
        raise CheckpointError(
            Problem("new-tokens-over-context", "--max-new-tokens", tokens=new_tokens, context=context)
        )
    if tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        lengths = [limit - 5 * i for i in range(NUM_RANDOM_PROMPTS)]
        rows = [torch.randint(config.vocab_size, (max(1, n),), generator=generator).tolist() for n in lengths]
    else:
        rows = [tokenizer(prompt)["input_ids"][:limit] or [0] for prompt in prompts]
    width = max(map(len, rows))
    # any id can pad, since it is masked; that of the tokenizer may have no row in the embedding
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return Batch(ids, mask)


def token_problems(encoded: EncodedPrompts, expanded: Any | None, known: int) -> tuple[str, ...]:
    """Return a problem for each prompt with other token ids than in the base.

    Exception: ids of new tokens may differ.
    """
    base = encoded.tokenizer
    if base is None:
        return ()
    if expanded is None:
        return ("the expanded model's tokenizer does not load, the base's does.",)
    pairs = [(prompt, base(prompt)["input_ids"], expanded(prompt)["input_ids"]) for prompt in encoded.prompts]
    differing = [pair for pair in pairs if pair[1] != pair[2] and max(pair[2], default=0) < known]
    return tuple(f"token ids of {text!r}: {has}, expected {wants}." for text, wants, has in differing)
