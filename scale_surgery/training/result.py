"""What a training run did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scale_surgery.checkpoint.names import LOG_FILE
from scale_surgery.training.outlook import LossChange, Outlook, compare_losses, disappointments
from scale_surgery.training.run_folder import CURVES_FILE, TrainingRun, last_measured

if TYPE_CHECKING:
    from scale_surgery.training.trainer import ExpansionTrainer


@dataclass(frozen=True)
class Training:
    """What `train` did.

    Attributes:
        path: The trained checkpoint.
        steps: Optimizer steps in all.
        seconds: Time since this call began training.
        trained_parameters: Number of parameters that trained.
        loss: Last loss of the log, nats per token.
        change: The loss before and after, on the same tokens.
        outlook: What the run was to do.
        warnings: Why it taught little.
        measured: Last measurement on old and new text; empty where nothing was measured.
        log: Log of the run, JSON lines.
        curves: Curves of the run, PNG.
        left_out: Files of the expanded folder that were not taken along: weights in other formats, links that lead out.
    """

    path: Path
    steps: int
    seconds: float
    trained_parameters: int
    loss: float | None
    change: LossChange | None
    outlook: Outlook
    warnings: tuple[str, ...]
    measured: Mapping[str, float]
    log: Path
    curves: Path
    left_out: tuple[str, ...] = ()


def describe(trainer: ExpansionTrainer, training: TrainingRun, outlook: Outlook, seconds: float) -> Training:
    """Say what a run did, when it is over."""
    log = trainer.state.log_history
    change = compare_losses(log, trainer.sides)
    losses = [entry["loss"] for entry in log if "loss" in entry]
    return Training(
        path=training.target,
        steps=trainer.state.global_step,
        seconds=seconds,
        trained_parameters=training.record["trained_parameters"],
        loss=losses[-1] if losses else None,
        change=change,
        outlook=outlook,
        warnings=(*outlook.warnings, *disappointments(change)),
        measured=last_measured(log),
        log=training.folder / LOG_FILE,
        curves=training.folder / CURVES_FILE,
        left_out=training.checkpoint.left_out,
    )
