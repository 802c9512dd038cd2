"""A short training run of a base model, of which only the changes of its matrices are kept.

What trains is held once in float32 beside two moments of AdamW, and the optimizer steps on a tensor as soon as its
gradient is there, so that no two gradients stand in memory together: 12 bytes for each parameter that trains. What does
not train stays as it is stored. The values at the start are read again from the files, one matrix at a time.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from scale_surgery.errors import TrainingError
from scale_surgery.planning.architecture import Role
from scale_surgery.planning.base import Base
from scale_surgery.progress import Track
from scale_surgery.running.sequences import Sequences
from scale_surgery.running.texts import collate
from scale_surgery.training.pilot_changes import Matrix, find_matrices, measure_updates, relative_changes
from scale_surgery.training.update_scores import Update

if TYPE_CHECKING:
    from scale_surgery.training.pilot_settings import PilotSettings

WARM_UP = 0.06  # share of the steps, as in `train`
# losses at the beginning and at the end are means over this share of the steps
REPORTED_SHARE = 0.05


@dataclass(frozen=True)
class PilotRun:
    """What a pilot did.

    Attributes:
        first_loss: Loss of the first steps, nats per token.
        last_loss: Loss of the last steps.
        seconds: Time of the training alone.
        trained_parameters: Number of parameters that trained.
        peak_memory_bytes: Most memory in use until its end: of the device, or of this process on the CPU; None where
            the system does not say.
        updates: Change of each matrix, by layer and role.
        halfway: Relative norm of the change of each layer after half of the steps.
    """

    first_loss: float
    last_loss: float
    seconds: float
    trained_parameters: int
    peak_memory_bytes: int | None
    updates: dict[int, dict[Role, Update]]
    halfway: dict[int, float]


def run_pilot(
    model: Any,
    base: Base,
    text: Sequences,
    settings: PilotSettings,
    steps: int,
    device: torch.device,
    track: Track,
) -> PilotRun:
    """Train a base model for a few steps, and measure how its matrices changed; the model is spent afterwards.

    Args:
        model: The base model as it is stored, of a stock class.
        base: What it was loaded from, and its facts.
        text: Sequences to learn.
        settings: How to train.
        steps: Optimizer steps.
        device: Where to train.
        track: Makes progress bars.

    Returns:
        Losses, and the change of each matrix that trained.

    Raises:
        TrainingError: If the loss is not a number, or a matrix holds other than finite numbers.
    """
    precision = choose_precision(model, settings, device)
    groups = ("ffn",) if settings.trains == "mlp" else ("attn", "ffn")
    matrices = find_matrices(model, base, groups)
    parameters = choose_trained(model, matrices, is_full=settings.trains == "full")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    started = time.monotonic()
    halfway: dict[int, float] = {}
    with track("pilot", steps) as advance:
        losses = []
        for loss in train_pilot(model.to(device), parameters, text, settings, steps, precision):
            losses.append(loss)
            advance(1, f"loss {loss:.3f}")
            if len(losses) == (steps + 1) // 2:
                halfway = relative_changes(matrices, base.checkpoint)
    seconds, peak = time.monotonic() - started, peak_memory(device)
    with track("scores", len(matrices)) as advance:
        updates = measure_updates(matrices, base, advance)
    part = math.ceil(REPORTED_SHARE * len(losses))
    return PilotRun(
        first_loss=sum(losses[:part]) / part,
        last_loss=sum(losses[-part:]) / part,
        seconds=seconds,
        trained_parameters=sum(parameter.numel() for parameter in parameters),
        peak_memory_bytes=peak,
        updates=updates,
        halfway=halfway,
    )


def choose_trained(model: Any, matrices: list[Matrix], *, is_full: bool) -> list[nn.Parameter]:
    """Let every parameter train, or the given matrices alone; what trains is float32 from here on."""
    model.requires_grad_(is_full)
    for matrix in matrices:
        matrix.module.weight.requires_grad_(True)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in parameters:
        # an update of less than a 256th of a bfloat16 number would be lost
        parameter.data = parameter.data.float()
    return parameters


def choose_precision(model: Any, settings: PilotSettings, device: torch.device) -> AbstractContextManager[Any]:
    """In which precision a forward pass computes: autocast to bfloat16, or float32 throughout."""
    is_bf16 = model.dtype != torch.float32 if settings.bf16 is None else settings.bf16
    if is_bf16:
        return torch.autocast(device.type, dtype=torch.bfloat16)
    model.float()
    return nullcontext()


def train_pilot(
    model: Any,
    parameters: list[nn.Parameter],
    text: Sequences,
    settings: PilotSettings,
    steps: int,
    precision: AbstractContextManager[Any],
) -> Iterator[float]:
    """Train in place, a step each time that the next loss is asked for.

    Args:
        model: The model, on its device.
        parameters: What trains, float32.
        text: Sequences to learn.
        settings: How to train.
        steps: Optimizer steps.
        precision: In which precision a forward pass computes.

    Yields:
        The loss of each step, nats per token.

    Raises:
        TrainingError: If a loss is not a number.
    """
    model.train()
    model.config.use_cache = False
    if settings.gradient_checkpointing:
        # transformers 5 renamed it on the way
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    device = next(model.parameters()).device
    with _seeded(settings.seed), _stepping(parameters) as set_rate:
        for step, batch in zip(range(1, steps + 1), batches(text, settings), strict=False):
            set_rate(settings.learning_rate * share_of_rate(step, steps))
            with precision:
                loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
            loss.backward()
            found = float(loss.detach())
            if not math.isfinite(found):
                raise TrainingError(
                    f"The loss is {found} at step {step} of the pilot, with a learning rate of "
                    f"{settings.learning_rate:g}. Lower --learning-rate."
                )
            yield found


def time_step(model: Any, text: Sequences, settings: PilotSettings, device: torch.device) -> float:
    """Estimate the seconds of a step: three times a forward pass, of which the backward pass is two.

    Args:
        model: The base model as it is stored.
        text: Sequences to learn.
        settings: How to train.
        device: Where to train.
    """
    precision, seconds = choose_precision(model, settings, device), math.inf
    model.to(device).eval()
    # the first pass does what is done once
    for batch in islice(batches(text, settings), 2):
        started = time.monotonic()
        with torch.no_grad(), precision:
            float(model(**{name: tensor.to(device) for name, tensor in batch.items()}, use_cache=False).loss)
        seconds = min(seconds, time.monotonic() - started)
    return 3 * seconds


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed what models draw, such as dropout, and give the state of before back."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


@contextmanager
def _stepping(parameters: list[nn.Parameter]) -> Iterator[Any]:
    """Step on each parameter as soon as its gradient is there, and free it; gives a function that sets the rate."""
    optimizers = {parameter: torch.optim.AdamW([parameter], weight_decay=0.0) for parameter in parameters}

    def step(parameter: Tensor) -> None:
        optimizer = optimizers[parameter]  # type: ignore[index]
        optimizer.step()
        optimizer.zero_grad()

    def set_rate(rate: float) -> None:
        for optimizer in optimizers.values():
            optimizer.param_groups[0]["lr"] = rate

    hooked: list[Any] = list(parameters)  # torch leaves this method without types
    hooks = [parameter.register_post_accumulate_grad_hook(step) for parameter in hooked]
    try:
        yield set_rate
    finally:
        for hook in hooks:
            hook.remove()


def share_of_rate(step: int, steps: int) -> float:
    """Share of the highest learning rate at a step, which counts from 1: a straight line up, then one down to zero."""
    warm_up = math.ceil(WARM_UP * steps)
    return step / warm_up if step <= warm_up else (steps + 1 - step) / (steps + 1 - warm_up)


def batches(text: Sequences, settings: PilotSettings) -> Iterator[dict[str, Tensor]]:
    """Yield batches without end, the sequences in a new order in each pass."""
    generator = torch.Generator().manual_seed(settings.seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < settings.batch_size:
            waiting += torch.randperm(len(text), generator=generator).tolist()
        rows, waiting = waiting[: settings.batch_size], waiting[settings.batch_size :]
        yield collate([text[row] for row in rows])


def peak_memory(device: torch.device) -> int | None:
    """Most memory that was in use until now, in bytes: of the device, or of this process on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
