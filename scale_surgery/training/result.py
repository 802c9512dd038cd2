"""The result of a training run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery.checkpoint.names import LOG_FILE
from scale_surgery.checkpoint.sources import listed
from scale_surgery.text.documents import read_documents
from scale_surgery.text.instructions import SHIPPED
from scale_surgery.text.uses import texts_of_two_uses
from scale_surgery.training.run_folder import CURVES_FILE, TrainingRun, last_measured
from scale_surgery.training.settings import SAMPLE, EvalData, TrainingSchedule, TrainingSettings

if TYPE_CHECKING:
    from scale_surgery.text.sequences import Sequences
    from scale_surgery.training.trainer import ExpansionTrainer

# least relative fall of the loss without a warning
LEAST_FALL = 0.01
# sequences by which text is taken for plain
LOOKED_AT = 1000


@dataclass(frozen=True)
class LossChange:
    """The loss before the first step and after the last one, measured on the same tokens by the same code.

    Attributes:
        text: The measured text: "new" for the new text of --eval-data, "text" for some of the sequences to learn.
        sequences: Number of measured sequences.
        before: Nats per token before the first step; None if the log lacks it.
        after: Nats per token after the last step.
    """

    text: str
    sequences: int
    before: float | None
    after: float


@dataclass(frozen=True)
class Training:
    """The result of `train`.

    Attributes:
        path: The trained checkpoint.
        steps: Optimizer steps in all.
        resumed: Steps that earlier runs did.
        seconds: Time since this call began training.
        trained_parameters: Number of trained parameters.
        loss: Last loss of the log: of the objective, with the terms of rehearsal and gates.
        change: The loss before and after, on the same tokens.
        schedule: Its schedule.
        warnings: What may be wrong with it, and reasons why it learned little.
        measured: Last measurement on old and new text; empty if nothing was measured.
        log: Log of the run, JSON lines.
        curves: Curves of the run, PNG.
        left_out: Files of the expanded folder that were not copied: weights in other formats, links that lead out.
    """

    path: Path
    steps: int
    resumed: int
    seconds: float
    trained_parameters: int
    loss: float | None
    change: LossChange | None
    schedule: TrainingSchedule
    warnings: tuple[str, ...]
    measured: Mapping[str, float]
    log: Path
    curves: Path
    left_out: tuple[str, ...] = ()


def describe_run(
    trainer: ExpansionTrainer, training: TrainingRun, schedule: TrainingSchedule, resumed: int, seconds: float
) -> Training:
    """Return the result of a finished run."""
    log = trainer.state.log_history
    change = compare_losses(log, trainer.sides)
    losses = [entry["loss"] for entry in log if "loss" in entry]
    return Training(
        path=training.target,
        steps=trainer.state.global_step,
        resumed=resumed,
        seconds=seconds,
        trained_parameters=training.record["trained_parameters"],
        loss=losses[-1] if losses else None,
        change=change,
        schedule=schedule,
        warnings=(*schedule.warnings, *loss_warnings(change)),
        measured=last_measured(log),
        log=training.folder / LOG_FILE,
        curves=training.folder / CURVES_FILE,
        left_out=training.source.left_out,
    )


def compare_losses(log: Sequence[Mapping[str, Any]], sides: Mapping[str, Sequences]) -> LossChange | None:
    """Return the loss before and after from the log, on new text or on a sample; None if it was not measured."""
    text = "new" if "new" in sides else SAMPLE
    key = f"{text}_nats_per_token"
    entries = [entry for entry in log if key in entry]
    if not entries:
        return None
    before = entries[0][key] if entries[0]["step"] == 0 else None
    return LossChange(text, len(sides[text]), before, entries[-1][key])


def loss_warnings(change: LossChange | None) -> tuple[str, ...]:
    """Return a warning if the loss rose or hardly fell."""
    if change is None or change.before is None or change.after < change.before * (1 - LEAST_FALL):
        return ()
    verb, advice = "hardly fell", "Train for more steps, or raise --learning-rate."
    if change.after > change.before:
        verb, advice = "rose", f"Lower --learning-rate; if it fell first ({CURVES_FILE}), take fewer --steps."
    which = "the new text" if change.text == "new" else "the texts to learn"
    return (f"the loss on {which} {verb}, from {change.before:.4f} to {change.after:.4f}. {advice}",)


def use_warnings(data: Sequence[str | Path], eval_data: EvalData, settings: TrainingSettings) -> tuple[str, ...]:
    """Return a warning for each text that is measured, and learned or rehearsed as well."""
    rehearsed = () if settings.rehearses_itself else settings.rehearse
    prompts = settings.rehearsal_prompts if settings.rehearses_itself else None
    others = {
        "--data": list(map(str, data)),
        "--rehearse": list(map(str, rehearsed)),
        "rehearsal_prompts": [] if prompts in (None, SHIPPED) else [prompts],
    }
    measured = list(map(str, (*listed(eval_data.old), *listed(eval_data.new))))
    return tuple(
        f"{found.where} is measured, and {found.values['trained']} has it too: its loss does not show how the model "
        "reads other text."
        for found in texts_of_two_uses({"--eval-data": (measured, others)})
    )


def turn_warnings(data: Sequence[str | Path], settings: TrainingSettings) -> tuple[str, ...]:
    """Return a warning if a model with a chat template learns text without turns, and rehearses none with turns."""
    if settings.rehearses_itself and not settings.rehearsal_raw:
        return ()
    # questions and instructions in rows are learned without the template, so they have no turns either
    texts = (*data, *(() if settings.rehearses_itself else settings.rehearse))
    if any(document.chat is not None for document in islice(read_documents(texts, whole=False), LOOKED_AT)):
        return ()
    return (
        "the tokenizer has a chat template, and the text has no turns. An instruct model that learns it may no longer "
        "end its answers, unless a router is added: rehearse its answers with --rehearse self.",
    )
