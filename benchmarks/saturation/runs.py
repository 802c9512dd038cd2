"""One run of benchmarks/saturation: a method learns new people, and is asked about old ones on the way."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from benchmarks.biography.methods import adapted, expanded, whole
from benchmarks.harness import keep_gate_scores, learn, rehearse, stepping
from benchmarks.language.methods import matched
from benchmarks.saturation.bases import Base
from benchmarks.saturation.facts import Facts, facts, questions, rows
from scale_surgery import Request

# people who are new to every base
FIRST_NEW = 60_000
WARM_UP = 20
# share of the questions about new people at which methods are compared, and at which a run ends
LEARNED, ENOUGH = 0.6, 0.65
# parameters of an expansion and of adapters: half of those of the layers
BUDGET = 36_864
UP_WIDTH = 16
RANK = 18
ADAPT = Request("all", variant="adapt", collaborate="both", up_width=UP_WIDTH, up_kv_heads=0)

# each method: what makes it of a base's folder and a seed, and the rate where its sweep begins
METHODS: dict[str, tuple[Any, float]] = {
    "full": (whole, 1e-3),
    "LoRA": (partial(adapted, start=True, rank=RANK), 3e-3),
    "preserve": (Request("all", up_width=UP_WIDTH, up_kv_heads=0), 1e-2),
    "adapt": (ADAPT, 3e-3),
    "gated": (Request(**vars(ADAPT) | {"variant": "gated"}), 3e-3),
    "grow": (Request("all", method="grow"), 3e-3),
}


@dataclass(frozen=True)
class Settings:
    """Settings that all runs share.

    Attributes:
        new_people: People to learn.
        asked: Old people who are asked about in each split; half of the base's people if they are fewer.
        steps: Most optimizer steps.
        together: New people in a batch; as many rehearsed rows stand beside them.
        every: Steps between two measurements.
        samples: Rows that the base writes; when they are used up, they are rehearsed again.
        weight: Weight of the divergence on own samples.
    """

    new_people: int = 250
    asked: int = 500
    steps: int = 1800
    together: int = 32
    every: int = 30
    samples: int = 8192
    weight: float = 1.0


@dataclass(frozen=True)
class Key:
    """Settings that no other run has; `rate` is the learning rate after the warm-up."""

    base: Base
    method: str
    rehearses: bool
    rate: float
    seed: int
    settings: Settings


@dataclass(frozen=True)
class Point:
    """Scores after some steps.

    Attributes:
        step: Optimizer steps done.
        new: Share of right answers about the new people.
        kept: Of what the base answers right about old people, the share that is still right; on the split by which
            rates are chosen.
        kept_test: The same on the split that is reported.
        nats: Nats of an answer about the old people of the split that is reported.
    """

    step: int
    new: float
    kept: float
    kept_test: float
    nats: float


@dataclass(frozen=True)
class Run:
    """A run that has ended; `base` is the share of the base's right answers on the reported split, and its nats."""

    key: Key
    parameters: int
    seconds: float
    base: tuple[float, float]
    points: tuple[Point, ...]

    @cached_property
    def matched(self) -> Point | None:
        """Scores at equal learning."""
        return self.at(LEARNED)

    def at(self, learned: float) -> Point | None:
        """Scores at a learned share, between two measurements in proportion; None if the run never got there."""
        for before, after in pairwise(self.points):
            if after.new >= learned:
                share = (learned - before.new) / (after.new - before.new)
                values = [
                    old + share * (new - old)
                    for old, new in zip(vars(before).values(), vars(after).values(), strict=True)
                ]
                return Point(*values)
        return None


class Exam:
    """Questions about old and new people, and what the base answers."""

    def __init__(self, base: Any, old: Sequence[Facts], settings: Settings) -> None:
        half = min(settings.asked, len(old) // 2)
        self.splits = [questions(some) for some in (old[:half], old[half : 2 * half])]
        self.new = questions(facts(settings.new_people, FIRST_NEW))
        answers = [_answer(base, *split) for split in self.splits]
        self.known = [right for right, _ in answers]
        right, nats = answers[1]
        self.base = float(right.float().mean()), float(nats)

    def score(self, model: Any, step: int) -> Point:
        """Ask a model."""
        new, _ = _answer(model, *self.new)
        (first, _), (test, nats) = (_answer(model, *split) for split in self.splits)
        kept = [float(right[known].float().mean()) for right, known in zip((first, test), self.known, strict=True)]
        return Point(step, float(new.float().mean()), *kept, float(nats))


def _answer(model: Any, asked: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
    """Return if each answer has the largest logit, and the mean nats of the answers."""
    with torch.inference_mode():
        logits = model.eval()(input_ids=asked, use_cache=False).logits[:, -1].float()
    return logits.argmax(-1) == answers, functional.cross_entropy(logits, answers)


def run(key: Key, work: Path) -> Run:
    """Train one model on the new people, until it has learned them or has no steps left."""
    started = time.process_time()
    base = AutoModelForCausalLM.from_pretrained(key.base.folder(work)).requires_grad_(False).eval()
    exam = Exam(base, facts(min(key.base.people, 2 * key.settings.asked)), key.settings)
    model = _make(key, work)
    samples = None
    if key.rehearses:
        samples = key.base.samples(work, key.settings.samples)
    points = tuple(_learn(key, model, base, samples, exam))
    parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return Run(key, parameters, round(time.process_time() - started, 1), exam.base, points)


def _make(key: Key, work: Path) -> Any:
    way, _ = METHODS[key.method]
    folder = key.base.folder(work)
    if not isinstance(way, Request):
        return way(folder, key.seed)
    request = way if way.method == "grow" else matched(folder, way, BUDGET)
    return expanded(folder, key.seed, request=request)


def _learn(key: Key, model: Any, base: Any, samples: Tensor | None, exam: Exam) -> Iterator[Point]:
    settings = key.settings
    take_step = stepping(model, key.rate, settings.steps, lambda step, _: min(1.0, (step + 1) / WARM_UP))
    keep_gate_scores(model)
    shown = rows(facts(settings.new_people, FIRST_NEW), settings.together, random.Random(key.seed))
    yield exam.score(model, 0)
    for step, batch in zip(range(settings.steps), shown, strict=False):
        model.train()
        learn(model, batch)
        if samples is not None:
            rehearse(model, base, samples.roll(-step * settings.together, 0)[: settings.together], settings.weight)
        take_step()
        if (step + 1) % settings.every == 0:
            point = exam.score(model, step + 1)
            yield point
            if point.new >= ENOUGH:
                break
