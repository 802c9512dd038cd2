"""How to train: what the user sets, and the defaults of the paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from scale_surgery.checkpoint.staging import BaseWeights
from scale_surgery.errors import TrainingError

GROUPS = ("w12", "w21", "w22", "w11", "biases", "norms", "embedding", "head", "attn", "ffn")
SCHEDULES = ("linear", "cosine", "constant")
LEAST = {
    "sequence_length": 2,
    "steps": 1,
    "epochs": 0,
    "batch_size": 1,
    "gradient_accumulation": 1,
    "learning_rate": 0,
    "warmup": 0,
    "weight_decay": 0,
    "max_gradient_norm": 0,
    "save_every": 1,
    "eval_every": 1,
    "log_every": 1,
    "seed": 0,
}
MOST_SEED = 2**32 - 1
ABOVE_ZERO = ("epochs", "learning_rate")


@dataclass(frozen=True)
class TrainingSettings:
    """How to train; learning rate, schedule and warm-up default to those of the paper (arXiv 2511.03270, section 5).

    Attributes:
        sequence_length: Tokens of a sequence; default: the model's context, at most 1024.
        packing: Cut all documents, one after the other, into full sequences; otherwise a document is a sequence.
        learn_prompts: Learn questions and prompts too, not answers alone.
        steps: Optimizer steps; default: as many as `epochs` take.
        epochs: Passes over the data, where `steps` is not given.
        batch_size: Sequences in one forward pass of one process.
        gradient_accumulation: Forward passes in one optimizer step.
        learning_rate: Highest learning rate.
        schedule: How the learning rate falls after the warm-up: "linear", "cosine" or "constant".
        warmup: Share of the steps in which the learning rate rises from zero.
        weight_decay: Weight decay of AdamW.
        max_gradient_norm: Gradients are clipped to this norm; 0 clips nothing.
        groups: What trains; see `GROUPS`.
        routed: Take the loss on what the router gives out, so that the adapt path learns where it is responsible;
            otherwise on the adapt path alone. For routed models.
        seed: Seed of the order of the data and of everything random.
        bf16: Compute in bfloat16 (autocast); default: where the base is stored in it.
        gradient_checkpointing: Compute activations again in the backward pass instead of keeping them.
        save_every: Steps between checkpoints; default: a tenth of the run.
        eval_every: Steps between measurements; default: a tenth of the run.
        log_every: Steps between entries of the log; default: 10, at most a tenth of the run.
    """

    sequence_length: int | None = None
    packing: bool = True
    learn_prompts: bool = False
    steps: int | None = None
    epochs: float = 1.0
    batch_size: int = 8
    gradient_accumulation: int = 1
    learning_rate: float = 1e-3
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    warmup: float = 0.06
    weight_decay: float = 0.0
    max_gradient_norm: float = 1.0
    groups: tuple[str, ...] = GROUPS
    routed: bool = False
    seed: int = 0
    bf16: bool | None = None
    gradient_checkpointing: bool = False
    save_every: int | None = None
    eval_every: int | None = None
    log_every: int | None = None


@dataclass(frozen=True)
class EvalData:
    """Texts on which a model is measured while it trains.

    Attributes:
        old: Files that tell what the base knows; forgetting is measured on them.
        new: Files with what is to be learned; learning is measured on them.
    """

    old: Sequence[str | Path] = ()
    new: Sequence[str | Path] = ()


@dataclass(frozen=True)
class TrainingStart:
    """How a training run starts.

    Attributes:
        resume: Continue an interrupted run in the output folder from its last whole checkpoint.
        base_weights: Of a new run, how base shards are taken over: "auto", "copy" or "link".
        overwrite: Whether a new run may replace an existing output folder.
    """

    resume: bool = False
    base_weights: BaseWeights = "auto"
    overwrite: bool = False


def check_settings(settings: TrainingSettings) -> None:
    """Check that settings make sense, on any model.

    Raises:
        TrainingError: If not; every setting that does not is named.
    """
    problems = [
        f"{name.replace('_', '-')}: {value}, expected at least {least}."
        for name, least in LEAST.items()
        if (value := getattr(settings, name)) is not None and not least <= value < math.inf
    ]
    problems += [f"{name.replace('_', '-')}: 0, expected more." for name in ABOVE_ZERO if getattr(settings, name) == 0]
    if settings.seed > MOST_SEED:
        problems.append(f"seed: {settings.seed}, expected at most {MOST_SEED}.")
    if settings.warmup >= 1:
        problems.append(f"warmup: {settings.warmup}, expected a share of the steps, less than 1.")
    if settings.schedule not in SCHEDULES:
        problems.append(f"schedule: {settings.schedule}, expected one of {', '.join(SCHEDULES)}.")
    problems += [
        f"train-only: {name} is no group of expansion tensors, expected some of {', '.join(GROUPS)}."
        for name in settings.groups
        if name not in GROUPS
    ]
    if problems:
        raise TrainingError.from_problems(problems)
