"""One run of benchmarks/biography/compare.py: train one method on the new people, measure on the way, keep a record."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from benchmarks.biography.methods import Method
from benchmarks.biography.train_model import ARCHITECTURE, STYLES, batches, documents, nats_per_token
from benchmarks.harness import stepping
from scale_surgery.biographies import (
    SHIPPED_MODEL,
    SHIPPED_PEOPLE,
    Person,
    Question,
    biography,
    first_token_accuracy,
    people,
    questions,
)

WIDTH = ARCHITECTURE["hidden_size"]
MEASURED = (0, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)  # shares of the steps; most is lost early


@dataclass(frozen=True)
class Settings:
    """What all runs of a comparison share.

    Attributes:
        new_people: People to learn.
        steps: Optimizer steps.
        rows: Rows of 256 tokens in a batch.
        old_questions: Questions about Task 0, one to a person.
        old_texts: Biographies of Task 0, spread over its people.
    """

    new_people: int = 100
    steps: int = 200
    rows: int = 4
    old_questions: int = SHIPPED_PEOPLE
    old_texts: int = 100


@dataclass(frozen=True)
class Point:
    """What a model scores after some steps, and how far it has moved.

    Attributes:
        step: Optimizer steps done.
        old_accuracy: Share of the questions about Task 0 that are answered.
        new_accuracy: The same of Task 1.
        old_loss: Nats per token of the texts of Task 0.
        new_loss: The same of Task 1.
        cosine: Of the base stream that enters the final norm and the base model's, mean over the tokens of the texts of
            Task 0; None where a router chooses between two streams.
        w12_norm: Frobenius norm of all W12 of a layer, mean over the layers that have any; None where none has.
    """

    step: int
    old_accuracy: float
    new_accuracy: float
    old_loss: float
    new_loss: float
    cosine: float | None = None
    w12_norm: float | None = None


@dataclass(frozen=True)
class Run:
    """One training run: what it was, what it took, and what it scored on the way."""

    method: str
    rate: float
    seed: int
    settings: Settings
    parameters: int
    seconds: float
    points: tuple[Point, ...]

    @property
    def key(self) -> tuple[str, float, int, Settings]:
        """What makes it this run and no other."""
        return self.method, self.rate, self.seed, self.settings

    @property
    def end(self) -> Point:
        """The scores after the last step."""
        return self.points[-1]


class Examination:
    """The questions and texts that every run is scored on, old ones and new ones."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: Settings) -> None:
        self.tokenizer = tokenizer
        old, new = people(SHIPPED_PEOPLE), people(settings.new_people, start=SHIPPED_PEOPLE)
        self.old_questions = one_question_each(old)[: settings.old_questions]
        self.new_questions = [question for person in new for question in questions(person)]
        self.old_texts = held_out_texts(old)[:: SHIPPED_PEOPLE // settings.old_texts]
        self.new_texts = held_out_texts(new)
        self.base_stream = self._old_loss(AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL))[1]

    def score(self, model: Any, step: int) -> Point:
        """Score a model, and leave it in training mode."""
        model.eval()
        accuracies = [
            first_token_accuracy(model, self.tokenizer, asked) for asked in (self.old_questions, self.new_questions)
        ]
        old_loss, stream = self._old_loss(model)
        new_loss = nats_per_token(model, self.tokenizer, self.new_texts)
        is_routed = getattr(model, "is_routing_enabled", False)
        cosine = None if is_routed else mean_cosine(stream, self.base_stream)
        model.train()
        return Point(step, *accuracies, old_loss, new_loss, cosine, w12_norm(model))

    def _old_loss(self, model: Any) -> tuple[float, Tensor]:
        """Score the texts of Task 0; return with it the base stream of their tokens, (tokens, d)."""
        seen: list[Tensor] = []
        (norm,) = (module for name, module in model.named_modules() if name.endswith("model.norm"))
        hook = norm.register_forward_pre_hook(lambda module, given: seen.append(given[0][..., :WIDTH]))
        loss = nats_per_token(model, self.tokenizer, self.old_texts)
        hook.remove()
        is_token = self.tokenizer(
            self.old_texts, padding=True, padding_side="right", return_tensors="pt"
        ).attention_mask
        return loss, seen[0][is_token == 1]


def mean_cosine(stream: Tensor, base_stream: Tensor) -> float:
    """Mean cosine of the rows of two matrices."""
    return float(torch.nn.functional.cosine_similarity(stream, base_stream).mean())


def w12_norm(model: Any) -> float | None:
    """Frobenius norm of all W12 of a layer, mean over the layers that have any; None where none has."""
    squares: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        if name.endswith(".w12"):
            layer = name.split("layers.")[1].split(".")[0]
            squares[layer] = squares.get(layer, 0.0) + float(parameter.detach().square().sum())
    return fmean(math.sqrt(square) for square in squares.values()) if squares else None


def one_question_each(group: tuple[Person, ...]) -> list[Question]:
    """Ask each person for one attribute, the attributes taking turns."""
    return [asked[index % len(asked)] for index, asked in enumerate(map(questions, group))]


def held_out_texts(group: tuple[Person, ...]) -> list[str]:
    """Tell each person's biography in a style that no training draws."""
    return [biography(person, STYLES + index) for index, person in enumerate(group)]


def new_batches(tokenizer: PreTrainedTokenizerBase, settings: Settings, seed: int) -> Iterator[Tensor]:
    """Yield, without end, packed batches of texts about the new people; the seed draws order and styles."""
    new = people(settings.new_people, start=SHIPPED_PEOPLE)
    for rows in batches(tokenizer, documents(new, random.Random(seed))):
        yield from rows.split(settings.rows)


def run(method: Method, rate: float, seed: int, examination: Examination, settings: Settings) -> Run:
    """Train one model on the new people."""
    start = time.process_time()
    # the seed is that of the order of texts, their styles, and the method's random tensors
    model = method.make(SHIPPED_MODEL, seed)
    texts = new_batches(examination.tokenizer, settings, seed)
    # `rate` is the peak of the learning rate
    points = tuple(train(model, rate, texts, examination, settings, routes_late=method.routes_late))
    parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return Run(method.name, rate, seed, settings, parameters, time.process_time() - start, points)


def train(
    model: Any,
    rate: float,
    texts: Iterator[Tensor],
    examination: Examination,
    settings: Settings,
    *,
    routes_late: bool = False,
) -> Iterator[Point]:
    """Train a model in place, and yield its scores on the way; a router may be on for the scores alone."""
    take_step = stepping(model, rate, settings.steps)
    measured = {round(share * settings.steps) for share in MEASURED}
    yield examination.score(model, 0)
    for step in range(1, settings.steps + 1):
        batch = next(texts)
        with model.routing_disabled() if routes_late else nullcontext():
            model(input_ids=batch, labels=batch).loss.backward()
        take_step()
        if step in measured:
            yield examination.score(model, step)
