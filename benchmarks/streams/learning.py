"""How every method learns a task: the same steps on the same batches, with or without rehearsal.

Without: cross entropy of the texts. With: also KL(before || model) on text that the model wrote itself before the task;
`before` is a copy of the model as it was then. What has an expansion or an adapter that is new is the base then.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from benchmarks.biography.train_model import CONTEXT, batches
from benchmarks.harness import stepping
from scale_surgery.progress import no_track
from scale_surgery.text.beginnings import begin_texts
from scale_surgery.text.tokenizing import pack
from scale_surgery.training.base_samples import sample_texts
from scale_surgery.training.rehearsal import divergence
from scale_surgery.training.sampling import Sampling

# tokens of a sample, the first one included; the base's biographies have 60
SAMPLE_LENGTH = 96


@dataclass(frozen=True)
class Settings:
    """What all runs share.

    Attributes:
        tasks: How many are learned in a row.
        size: People in a group.
        steps: Optimizer steps for each task.
        rows: Rows of 256 tokens in a batch.
        samples: What a model writes before a task, where it rehearses.
        old_questions: Asked about what the base knows, one to a person.
    """

    tasks: int = 10
    size: int = 20
    steps: int = 120
    rows: int = 2
    samples: int = 800
    old_questions: int = 200


@dataclass(frozen=True)
class Rehearsal:
    """What a model wrote before a task, and the model as it was: one row stands beside the rows of each step."""

    before: Any
    rows: Tensor

    def loss(self, model: Any, step: int) -> Tensor:
        """KL(before || model) on the row of a step, nats per token."""
        row = self.rows[step % len(self.rows)][None]
        with torch.no_grad():
            wanted = self.before(input_ids=row, use_cache=False).logits
        return divergence(model(input_ids=row, use_cache=False).logits, wanted, torch.ones_like(row))


def make_rehearsal(model: Any, tokenizer: PreTrainedTokenizerBase, samples: int, seed: int) -> Rehearsal:
    """Let a model write, and keep a copy of it as it is."""
    before = deepcopy(model).requires_grad_(False).eval()
    begins = begin_texts(tokenizer, "model")
    written = pack(sample_texts(before, begins, Sampling(samples, SAMPLE_LENGTH, 1.0, seed), no_track), CONTEXT, ())
    # what fills no row is left out
    rows = (written[place]["input_ids"].long() for place in range(len(written)))
    return Rehearsal(before, torch.stack([row for row in rows if len(row) == CONTEXT]))


def learn(
    model: Any,
    rate: float,
    texts: Iterator[str],
    tokenizer: PreTrainedTokenizerBase,
    settings: Settings,
    rehearsal: Rehearsal | None,
) -> None:
    """Train what trains of a model, in place."""
    take_step = stepping(model, rate, settings.steps)
    read = (rows for many in batches(tokenizer, texts) for rows in many.split(settings.rows))
    model.train()
    for step, batch in zip(range(settings.steps), read, strict=False):
        model(input_ids=batch, labels=batch).loss.backward()
        if rehearsal is not None:
            rehearsal.loss(model, step).backward()
        take_step()
    model.eval()
