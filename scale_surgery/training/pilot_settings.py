"""How a pilot run trains: what the user sets, and what is taken where nothing is said."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

TRAINS = ("mlp", "full")
LEAST = {"steps": 1, "batch_size": 1, "sequence_length": 2, "seed": 0}
MOST_SEED = 2**32 - 1


@dataclass(frozen=True)
class PilotSettings:
    """How a pilot run trains the base model, by AdamW without weight decay.

    Attributes:
        trains: "mlp", the matrices of all feed-forward networks; "full", every parameter.
        steps: Optimizer steps.
        batch_size: Sequences in a step.
        sequence_length: Tokens of a sequence; default: the model's context, at most 1024.
        learning_rate: Highest learning rate, after a warm-up over the first 6% of the steps; it then falls to zero in a
            straight line.
        seed: Seed of the order of the data, and of dropout.
        bf16: Compute in bfloat16 (autocast); default: where the base is stored in it.
        gradient_checkpointing: Compute activations again in the backward pass instead of keeping them.
    """

    trains: Literal["mlp", "full"] = "mlp"
    steps: int = 200
    batch_size: int = 8
    sequence_length: int | None = None
    learning_rate: float = 1e-4
    seed: int = 0
    bf16: bool | None = None
    gradient_checkpointing: bool = False


def pilot_problems(settings: PilotSettings) -> list[str]:
    """What is wrong with the settings of a pilot, on any model."""
    problems = [
        f"--{name.replace('_', '-')} is {value}, expected at least {least}."
        for name, least in LEAST.items()
        if (value := getattr(settings, name)) is not None and not least <= value < math.inf
    ]
    if not 0 < settings.learning_rate <= 1:
        problems.append(f"--learning-rate is {settings.learning_rate}, expected more than 0 and at most 1.")
    if settings.seed > MOST_SEED:
        problems.append(f"--seed is {settings.seed}, expected at most {MOST_SEED}.")
    if settings.trains not in TRAINS:
        problems.append(f"--train is {settings.trains!r}, expected one of: {', '.join(TRAINS)}.")
    return problems
