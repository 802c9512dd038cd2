"""The schedule of a run and the Trainer's arguments: steps, precision, and the intervals of logs and checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery.errors import Problem, TrainingError
from scale_surgery.running.device import choose_device, has_bfloat16
from scale_surgery.running.options import RunOptions
from scale_surgery.training.settings import TrainingSchedule, TrainingSettings

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from scale_surgery.text.sequences import Sequences

PARTS_OF_A_RUN = 10
MOST_STEPS_BETWEEN_LOGS = 10
# share and least number of warm-up steps; AdamW's mean of squared gradients is noisy before ten steps
WARM_UP, LEAST_WARM_UP = 0.06, 10
HALF_DTYPES = {"BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class Precision:
    """The precision in which a model trains.

    Attributes:
        bf16: True if it computes in bfloat16 by autocast.
        widens: True if a base in bfloat16 or float16 is loaded in float32, which changes none of its numbers.
        reason: Reason for the choice; empty if the base is in float32.
    """

    bf16: bool
    widens: bool = False
    reason: str = ""


def choose_precision(stored: str, settings: TrainingSettings, run: RunOptions) -> Precision:
    """Choose the precision by the settings, the dtype of the base, and the processor.

    Args:
        stored: Dtype of the base, in safetensors' name.
        settings: Settings of the training.
        run: Device of the run.
    """
    if stored not in HALF_DTYPES:
        return Precision(bool(settings.bf16))
    half, is_quantised = HALF_DTYPES[stored], settings.base_quantization is not None
    if settings.bf16:
        return Precision(True, reason="autocast to bfloat16")
    if settings.bf16 is None and (is_quantised or has_bfloat16(choose_device(run.device, only_trains=True))):
        return Precision(True, reason=f"autocast to bfloat16; the base is stored in {half}")
    # a quantised base keeps its own dtype
    if settings.bf16 is False and (stored == "BF16" or is_quantised):
        return Precision(False, reason=f"{half} without autocast")
    if settings.bf16 is False:
        return Precision(False, widens=True, reason="float32: small gradients would be zero in float16")
    reason = f"float32: this processor has no instructions for bfloat16, and the base is stored in {half}; see --bf16"
    return Precision(False, widens=True, reason=reason)


def training_schedule(settings: TrainingSettings, learned: Sequences, processes: int) -> TrainingSchedule:
    """Return the steps, sequences and passes of a run."""
    together = settings.batch_size * settings.gradient_accumulation * processes
    # as in the Trainer: the last step of a pass takes the remaining sequences, and none of the next pass; of several
    # processes, each has a full batch, and it is filled with the first sequences of the same pass
    steps_a_pass = math.ceil(len(learned) / together)
    steps = settings.steps or math.ceil(settings.epochs * steps_a_pass)
    warmup = warmup_steps(settings, steps)
    return TrainingSchedule(
        steps=steps,
        warmup_steps=warmup,
        learning_rate=_highest_rate(settings, steps, warmup),
        sequences=len(learned),
        tokens=learned.scored,
        passes=steps / steps_a_pass,
        # samples of the base are described after they are drawn
        rehearses="" if settings.rehearses_itself else describe_rehearsal(settings, "the given text"),
    )


def warmup_steps(settings: TrainingSettings, steps: int) -> int:
    """Return the steps in which the learning rate rises."""
    if settings.warmup is None:
        # a shorter run ends within the warm-up: the first steps of AdamW are large for any gradient
        return max(math.ceil(WARM_UP * steps), LEAST_WARM_UP) if steps > 1 else 0
    # the first step has a learning rate of 0, so a single step would learn nothing
    return min(math.ceil(settings.warmup * steps), steps - 1)


def _highest_rate(settings: TrainingSettings, steps: int, warmup: int) -> float | None:
    rate = settings.learning_rate
    if rate is None or steps > warmup:
        return rate
    return float(f"{rate * (steps - 1) / warmup:.3g}")


def describe_rehearsal(settings: TrainingSettings, which: str) -> str:
    """Describe the rehearsal text and its amount per batch; empty without rehearsal."""
    if not settings.rehearse:
        return ""
    learned = "sequence" if settings.batch_size == 1 else f"{settings.batch_size:,} sequences"
    return f"{which}, {settings.rehearsed_rows:,} beside each {learned} to learn"


def make_arguments(
    settings: TrainingSettings,
    folder: Path,
    steps: int,
    run: RunOptions,
    *,
    bf16: bool,
    is_measured: bool,
) -> TrainingArguments:
    """Return the arguments of the Trainer."""
    from transformers import TrainingArguments

    assert settings.learning_rate is not None, "see `with_rate`"
    tenth = math.ceil(steps / PARTS_OF_A_RUN)
    # renamed within transformers 5
    names = {field.name for field in fields(TrainingArguments)}
    checkpointing = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
    options: dict[str, Any] = {checkpointing: settings.gradient_checkpointing}
    arguments = TrainingArguments(
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
        logging_steps=settings.log_every or min(MOST_STEPS_BETWEEN_LOGS, tenth),
        # a loss of NaN must show
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
    # without a launcher, the Trainer would copy the model to each GPU that it sees (DataParallel). Copies have no new
    # blocks, and a step would read more sequences than the schedule says
    arguments._n_gpu = min(arguments.n_gpu, 1)
    # a configuration of accelerate may name another precision, in which no record says that the run computed
    arguments.mixed_precision = "bf16" if bf16 else "no"
    return arguments


def is_cpu(run: RunOptions) -> bool:
    """Return True if training runs on the CPU, by request or because there is no accelerator."""
    return choose_device(run.device, only_trains=True).removesuffix(":0") == "cpu"


def check_device(run: RunOptions) -> None:
    """Check that training can run on the requested device: accelerate supports the CPU and the default accelerator."""
    accelerator = choose_device("auto", only_trains=True)
    # the first of its kind is the one that accelerate takes
    if choose_device(run.device, only_trains=True).removesuffix(":0") not in ("cpu", accelerator):
        choices = dict.fromkeys(("auto", "cpu", accelerator))
        raise TrainingError(Problem("training-device", "--device", device=run.device, choices=list(choices)))
