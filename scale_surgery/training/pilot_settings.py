"""How a pilot run trains: what the user sets, and what is taken where nothing is said."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from scale_surgery.fields import Count, Range, Seed, SequenceLength


@dataclass(frozen=True)
class PilotSettings:
    """How a pilot run trains the base model, by AdamW without weight decay.

    Attributes:
        trains: mlp trains the matrices of all MLPs, full every parameter.
        steps: Optimizer steps.
        batch_size: Sequences in one optimizer step.
        sequence_length: Tokens in a sequence. Default: the model's context length, at most 1024.
        learning_rate: Highest learning rate. It rises over the first 6% of the steps, then falls linearly to zero.
        seed: Seed of the order of the data and of dropout.
        bf16: Compute in bfloat16 (autocast). Default: on where the base is stored in bfloat16.
        gradient_checkpointing: Recompute activations in the backward pass instead of keeping them: less memory, more
            time.
    """

    trains: Literal["mlp", "full"] = field(default="mlp", metadata={"option": "train"})
    steps: Count = 200
    batch_size: Count = 8
    sequence_length: SequenceLength | None = None
    learning_rate: Annotated[float, Range(above=0, most=1)] = 1e-4
    seed: Seed = 0
    bf16: bool | None = None
    gradient_checkpointing: bool = False
