"""Train one model of a comparison in memory: the same batches, own samples, optimizer and schedule for each method."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from scale_surgery.comparing.methods import Made, Method, Place
from scale_surgery.errors import Problem, TrainingError
from scale_surgery.progress import Progress
from scale_surgery.running.gates import gated_blocks, keeping_scores
from scale_surgery.running.pieces import Tail
from scale_surgery.text.sequences import Sequences
from scale_surgery.training.arguments import warmup_steps
from scale_surgery.training.chunked_loss import find_pieces, loss_in_pieces
from scale_surgery.training.gates import loss_of_gates
from scale_surgery.training.memory import free_bytes
from scale_surgery.training.pilot import share_of_rate
from scale_surgery.training.rehearsal import BaseModel, Rehearsal, divergence_from_base, shuffled_batch
from scale_surgery.training.settings import TrainingSettings

POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Lesson:
    """Texts to learn, own samples of the base or None, and the number of steps."""

    texts: Sequences
    rehearsal: Rehearsal | None
    settings: TrainingSettings
    steps: int

    @property
    def tokens(self) -> int:
        """Tokens to learn that are read, prompts included, about: windows are of several lengths."""
        return round(self.steps * self.settings.batch_size * self.texts.tokens / len(self.texts))

    @property
    def warm_up(self) -> int:
        """Steps in which the learning rate rises: those of `train`, or half of a try of a rate, which has few."""
        return max(1, min(warmup_steps(self.settings, self.steps), math.ceil(self.steps / 2)))

    def batch(self, step: int) -> dict[str, Tensor]:
        """Return the batch of a step; each pass over the texts is shuffled anew."""
        return shuffled_batch(self.texts, step, self.settings.batch_size, self.settings.seed)


@dataclass
class Peak:
    """Most memory inside a `with` block, weights included; known at its end."""

    bytes: int = 0


@contextmanager
def watching_memory(device: torch.device) -> Iterator[Peak]:
    """Take the most memory of a `with` block: what torch has allocated on a GPU, or this process's memory."""
    peak, is_over = Peak(), threading.Event()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device)
        return

    def watch() -> None:
        while not is_over.wait(POLL_SECONDS):
            peak.bytes = max(peak.bytes, psutil.Process().memory_info().rss)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        is_over.set()
        thread.join()


def check_memory(name: str, method: Method, place: Place) -> None:
    """Refuse a method that the machine's free memory cannot hold: the system would kill the whole comparison."""
    needed, free = method.least_bytes(place), free_bytes("cpu")
    if torch.device(place.run.device).type == "cpu" and free is not None and needed > free:
        raise TrainingError(Problem("memory-short", name, needed=needed, free=free))


def learn(made: Made, lesson: Lesson, rate: float, advance: Progress) -> list[float]:
    """Train a model and return the seconds of its steps.

        loss = cross entropy (new text) + weight * KL(base || model) on own samples + the loss of gates

    Training ends early if the loss is not finite; the scores show it.
    """
    trained = [parameter for parameter in made.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=lesson.settings.weight_decay)
    schedule = LambdaLR(optimizer, lambda step: share_of_rate(step + 1, lesson.steps, lesson.warm_up))
    step_of, seconds = _Step(made, lesson), list[float]()
    made.model.train()
    devices = [parameter.device for parameter in trained[:1] if parameter.device.type == "cuda"]
    with torch.random.fork_rng(devices), keeping_scores(made.inside):
        torch.manual_seed(lesson.settings.seed)  # for randomness inside models, such as dropout
        for step in range(lesson.steps):
            started = time.perf_counter()
            loss = step_of(step)
            torch.nn.utils.clip_grad_norm_(trained, lesson.settings.max_gradient_norm or math.inf)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - started)
            advance(1, f"loss {loss:.3f}")
            if not math.isfinite(loss):
                break
    made.model.eval()
    return seconds


class _Step:
    """Gradients of a step: of the text to learn, then of own samples, so that one graph is held at a time."""

    def __init__(self, made: Made, lesson: Lesson) -> None:
        self.made, self.lesson = made, lesson
        self.device = next(made.model.parameters()).device
        self.gates = gated_blocks(made.inside)
        first = self._on_device(lesson.batch(0))
        self.tail = find_pieces(made.model, made.inside, first)
        self.base = self._base(first)

    def _base(self, batch: dict[str, Tensor]) -> BaseModel:
        made = self.made
        if made.base is made.model:
            return BaseModel(made.model, made.inside, made.alone, self.tail)
        tail: Tail | None = find_pieces(made.base, made.base, batch)
        return BaseModel(made.base, made.base, made.alone, tail)

    def _on_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self.device) for name, tensor in batch.items()}

    def __call__(self, step: int) -> float:
        """Add the gradients of a step, and return its loss."""
        batch, inside = self._on_device(self.lesson.batch(step)), self.made.inside
        with self._precision():
            with nullcontext() if self.tail is None else loss_in_pieces(inside, self.tail, batch):
                loss: Any = self.made.model(**batch, use_cache=False)["loss"]
            if self.gates:
                loss = loss + loss_of_gates(inside, batch["attention_mask"], is_new=True)
        loss.backward()
        return float(loss.detach()) + (0.0 if self.lesson.rehearsal is None else self._rehearse(step))

    def _rehearse(self, step: int) -> float:
        rehearsal, inside = self.lesson.rehearsal, self.made.inside
        assert rehearsal is not None
        batch = self._on_device(rehearsal.batch(step))
        with self._precision():
            loss: Any = rehearsal.weight * divergence_from_base(self.made.model, inside, batch, self.tail, self.base)
            if self.gates:
                loss = loss + loss_of_gates(inside, batch["attention_mask"], is_new=False)
        loss.backward()
        return float(loss.detach())

    def _precision(self) -> Any:
        is_cuda = self.device.type == "cuda"
        return torch.autocast("cuda", torch.bfloat16) if is_cuda else nullcontext()
