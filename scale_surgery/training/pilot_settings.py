"""How pilots train and how much they may read: what the user sets, and what is taken where nothing is said."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from scale_surgery.fields import Count, Range, Seed, SequenceLength

# by default no text is read more often: what is learned by heart tells nothing of layers
USUAL_PASSES = 4


@dataclass(frozen=True)
class PilotSettings:
    """How pilots train the base model, by AdamW without weight decay.

    Attributes:
        trains: mlp trains the matrices of all MLPs, full every parameter.
        tokens: Tokens that all pilots together may read. No token of the text is read more than 4 times, either.
        minutes: Minutes that all pilots together may train. The time is estimated before the first step; what takes
            longer gets fewer steps.
        pilots: Short runs, each on its own share of the text; where they disagree about two layers, these are a tie.
            All start at the same weights, so they agree about what any text would do.
        steps: Optimizer steps of each pilot, in place of what --tokens pays for. Default: as many as these are.
        batch_size: Sequences in one optimizer step.
        sequence_length: Tokens in a sequence. Default: the model's context length, at most 1024.
        learning_rate: Highest learning rate. It rises over the first 6% of the steps, then falls linearly to zero.
        seed: Seed of the order of the data and of dropout.
        bf16: Compute in bfloat16 (autocast). Default: on where the base is stored in bfloat16.
        gradient_checkpointing: Recompute activations in the backward pass instead of keeping them: less memory, more
            time.
    """

    trains: Literal["mlp", "full"] = field(default="mlp", metadata={"option": "train"})
    # fifty steps of the other defaults at 1024 tokens; see ENOUGH_STEPS
    tokens: Count = 204_800
    minutes: Annotated[float, Range(above=0)] = 10.0
    pilots: Count = 2
    steps: Count | None = None
    batch_size: Count = 2
    sequence_length: SequenceLength | None = None
    learning_rate: Annotated[float, Range(above=0, most=1)] = 1e-4
    seed: Seed = 0
    bf16: bool | None = None
    gradient_checkpointing: bool = False


@dataclass(frozen=True)
class PilotBudget:
    """How much pilots read, as it is known before the first step.

    Attributes:
        pilots: How many there are.
        steps: Optimizer steps of each.
        tokens: Tokens that all of them read.
        passes: How often each token of the text is read, by one of them.
        seconds: Estimate of the time that all of them train; None before it was made.
        is_cut: Whether the time left fewer steps than the tokens.
    """

    pilots: int
    steps: int
    tokens: int
    passes: float
    seconds: float | None = None
    is_cut: bool = False

    def within(self, minutes: float, step_seconds: float) -> PilotBudget:
        """The same with as many steps as fit into a time, at least one each.

        Args:
            minutes: What all pilots may take.
            step_seconds: What one step takes.
        """
        fitting = max(1, int(60 * minutes / (step_seconds * self.pilots)))
        steps = min(self.steps, fitting)
        share = steps / self.steps
        return replace(
            self,
            steps=steps,
            tokens=round(self.tokens * share),
            passes=self.passes * share,
            seconds=steps * self.pilots * step_seconds,
            is_cut=steps < self.steps,
        )


def budget_pilots(settings: PilotSettings, sequences: int, length: int) -> PilotBudget:
    """How many steps pilots take.

    Args:
        settings: What was asked for.
        sequences: Sequences of the text.
        length: Tokens of one.
    """
    pilots = min(settings.pilots, sequences)
    share = sequences / pilots
    paid = settings.tokens / (pilots * settings.batch_size * length)
    steps = settings.steps or max(1, math.floor(min(paid, USUAL_PASSES * share / settings.batch_size)))
    read = steps * settings.batch_size
    return PilotBudget(pilots, steps, pilots * read * length, read / share)
