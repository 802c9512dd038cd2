"""What the Trainer is told: steps, schedule, precision, how often it logs, measures and saves."""

from __future__ import annotations

import math
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery.errors import TrainingError
from scale_surgery.running.device import choose_device
from scale_surgery.running.options import RunOptions
from scale_surgery.training.settings import TrainingSettings

if TYPE_CHECKING:
    from transformers import TrainingArguments

PARTS_OF_A_RUN = 10
LONGEST_WAIT = timedelta(hours=6)
MOST_STEPS_BETWEEN_LOGS = 10


def number_of_steps(settings: TrainingSettings, sequences: int, processes: int) -> int:
    """Optimizer steps: those that were asked for, or what the epochs take.

    Args:
        settings: What the user set.
        sequences: Sequences of one epoch.
        processes: Processes that share them.
    """
    batches = math.ceil(sequences / (settings.batch_size * processes))
    return settings.steps or math.ceil(settings.epochs * math.ceil(batches / settings.gradient_accumulation))


def warmup_steps(settings: TrainingSettings, steps: int) -> int:
    """Optimizer steps in which the learning rate rises."""
    # the first of them has a learning rate of 0, so one step alone would teach nothing
    return min(math.ceil(settings.warmup * steps), steps - 1)


def make_arguments(
    settings: TrainingSettings, folder: Path, steps: int, run: RunOptions, *, bf16: bool, is_measured: bool
) -> TrainingArguments:
    """Say to the Trainer how to train.

    Args:
        settings: What the user set.
        folder: Where it puts checkpoints.
        steps: Optimizer steps.
        run: Where it trains: device; see `check_device`.
        bf16: Whether to compute in bfloat16.
        is_measured: Whether there is text to measure on during the run.

    Returns:
        The Trainer's arguments.
    """
    from transformers import TrainingArguments

    tenth = math.ceil(steps / PARTS_OF_A_RUN)
    # transformers 5 renamed it on the way
    names = {field.name for field in fields(TrainingArguments)}
    checkpointing = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
    options: dict[str, Any] = {checkpointing: settings.gradient_checkpointing}
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant_with_warmup" if settings.schedule == "constant" else settings.schedule,
        warmup_steps=warmup_steps(settings, steps),
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_gradient_norm,
        seed=settings.seed,
        bf16=bf16,
        save_strategy="steps",
        save_steps=settings.save_every or tenth,
        eval_strategy="steps" if is_measured else "no",
        eval_steps=(settings.eval_every or tenth) if is_measured else None,
        eval_on_start=is_measured,
        logging_steps=settings.log_every or min(MOST_STEPS_BETWEEN_LOGS, tenth),
        # a loss that is not a number must be seen
        logging_nan_inf_filter=False,
        use_cpu=is_cpu(run),
        dataloader_pin_memory=not is_cpu(run),
        remove_unused_columns=False,
        disable_tqdm=True,
        # callbacks are added by name, see `reports`
        report_to="none",
        run_name=folder.parent.name,
        ddp_find_unused_parameters=False,
        **options,
    )


def is_cpu(run: RunOptions) -> bool:
    """Whether training runs on the CPU, asked for or because there is nothing else."""
    return choose_device(run.device, only_trains=True) == "cpu"


def check_device(run: RunOptions) -> None:
    """Check that training can run where it is asked to: accelerate takes the CPU, or the accelerator that there is.

    Raises:
        TrainingError: If not.
    """
    there = choose_device("auto", only_trains=True)
    if choose_device(run.device, only_trains=True) not in ("cpu", there):
        found = "no accelerator" if there == "cpu" else f"an accelerator called {there}"
        raise TrainingError(
            f"--device is {run.device}, found {found} on this machine; expected auto, cpu or that. Of several GPUs the "
            "variable CUDA_VISIBLE_DEVICES chooses, and accelerate launch takes more than one."
        )
