"""One run of benchmarks/language: a method learns the second language, is measured on the way, and is recorded."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.harness import keep_gate_scores, stepping, with_gates
from benchmarks.language.base import SIZES, base_rows, make_base, new_rows
from benchmarks.language.measures import Examination, Ranking, Reading
from benchmarks.language.methods import Method
from benchmarks.language.packages import ENGLISH
from benchmarks.language.precision import mixed
from benchmarks.language.rehearsing import Rehearsal, rehearsal_of
from scale_surgery.modeling.expanded_stock import opened
from scale_surgery.running.gates import gated_blocks, keeping_scores, take_scores
from scale_surgery.training.rehearsal import Divergence

MEASURED = (0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)  # shares of the steps; most is lost early
SHUT_ROWS = 16  # that are read together
Rehearse = Literal["none", "own", "own x4", "old"]


@dataclass(frozen=True)
class Subject:
    """What all runs of a comparison share.

    Attributes:
        size: Name of the base's size.
        second: Code of the language that is learned.
    """

    size: str
    second: str


@dataclass(frozen=True)
class Key:
    """What makes a run this one and no other.

    Attributes:
        subject: Base and language.
        method: Name of the method.
        rehearse: What is rehearsed: nothing, samples that the base wrote, a hundredth of what it was trained on or four
            times that, or a hundredth of what it was trained on itself.
        rate: Peak of the learning rate.
        tokens: Of the second language that are learned.
        seed: Of the order of texts and of random tensors.
        weight: Of the divergence in rehearsal.
    """

    subject: Subject
    method: str
    rehearse: Rehearse
    rate: float
    tokens: int
    seed: int
    weight: float = 1.0


@dataclass(frozen=True)
class Point:
    """What a model loses on the way, in nats per token of the development split.

    Attributes:
        tokens: Learned so far.
        old: In the first language.
        new: In the second.
    """

    tokens: int
    old: float
    new: float


@dataclass(frozen=True)
class Scores:
    """What a model scores on what is held out for the end.

    Attributes:
        old: Text of the first language.
        new: Text of the second.
        ranking: Right answers among candidates; None where that was not asked.
        parallel: Accuracy of the next token in paragraphs that mean the same, in both languages; None with ranking.
        divergence: KL(base || model) on text of the second language, nats per token; None in older records.
        shut: Share of the tokens of both languages at which all gates are exactly zero; None without gates.
    """

    old: Reading
    new: Reading
    ranking: Ranking | None = None
    parallel: tuple[float, float] | None = None
    divergence: float | None = None
    shut: tuple[float, float] | None = None


@dataclass(frozen=True)
class Run:
    """A run that has ended.

    Attributes:
        key: Which one.
        parameters: That train.
        seconds: Of processor time, measuring included.
        points: On the way.
        scores: At the end; None for a run of the sweep.
        step_seconds: Of processor time, steps alone, for each of them; None in older records.
        ends: Of what else was made of it at the end, by name; text alone, because rankings take twice its time.
    """

    key: Key
    parameters: int
    seconds: float
    points: tuple[Point, ...]
    scores: Scores | None = None
    step_seconds: float | None = None
    # last, because a record that is whole ends with an object
    ends: dict[str, Scores] = field(default_factory=dict)


def perplexity(scores: Sequence[Scores], part: Literal["old", "new"]) -> float:
    """Of the mean of nats over runs."""
    return math.exp(fmean(getattr(score, part).nats for score in scores))


class Place:
    """A base, what it is examined on and what it learns, once for all runs of a process."""

    def __init__(self, work: Path, subject: Subject) -> None:
        self.work, self.subject, self.size = work, subject, SIZES[subject.size]
        self.base = make_base(work, subject.size, subject.second)
        self.tokenizer = AutoTokenizer.from_pretrained(self.base)
        self.examination = Examination(work, self.tokenizer, subject.second, self.size.context)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def rows(self, tokens: int, seed: int) -> Tensor:
        """Text of the second language that is new to the base; (rows, context)."""
        return new_rows(self.work, self.tokenizer, self.subject.second, self.size, tokens, seed)

    def divergence(self, model: Any) -> float:
        """KL(base || model) on held-out text of the second language, nats per token."""
        base = AutoModelForCausalLM.from_pretrained(self.base).to(self.device).eval()
        rows = self.examination.rows[self.subject.second, "dev"].to(self.device).split(self.size.rows)
        with torch.inference_mode():
            return fmean(_divergence(model, base, part) for part in rows)

    def rehearsal(self, rehearse: Rehearse, seed: int) -> Rehearsal | None:
        """What is rehearsed."""
        old = partial(base_rows, self.work, self.tokenizer, self.subject.second, self.size, 0)
        return rehearsal_of(self.base, rehearse, old, self.size, seed, self.device)


def _divergence(model: Any, base: Any, rows: Tensor) -> float:
    with mixed(rows.device.type):
        logits, wanted = (network(input_ids=rows, use_cache=False).logits.flatten(0, 1) for network in (model, base))
    return float(Divergence.apply(logits, wanted))  # type: ignore[no-untyped-call]


def run(place: Place, method: Method, key: Key, *, is_examined: bool = True) -> Run:
    """Train one model on the second language."""
    started = time.process_time()
    model = method.make(place.base, key.seed).to(place.device)
    taken: list[float] = []
    # a run of the sweep is neither measured on the way nor scored on what is held out for the end
    points = tuple(_learn(place, model, key, MEASURED if is_examined else (0, 1), taken))
    scores, ends = None, {}
    if is_examined:
        # rankings take as long as a third of the steps, and one seed of them says what they say
        scores = examine(place, model) if key.seed == 0 else read(place, model)
        ends = {name: read(place, make(place.base, model)) for name, make in method.ends.items()}
    parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return Run(key, parameters, round(time.process_time() - started, 1), points, scores, round(fmean(taken), 3), ends)


def run_base(place: Place) -> Run:
    """Score the base, which learns nothing."""
    model = AutoModelForCausalLM.from_pretrained(place.base).to(place.device)
    return Run(Key(place.subject, "base", "none", 0.0, 0, 0), 0, 0.0, (_point(place, model, 0),), examine(place, model))


def examine(place: Place, model: Any) -> Scores:
    """Score a model on what is held out for the end."""
    return replace(
        read(place, model), ranking=place.examination.rank(model), parallel=place.examination.parallel(model)
    )


def read(place: Place, model: Any) -> Scores:
    """Score a model on the text that is held out for the end."""
    old, new = place.examination.read(model.eval(), "test")
    shares = None
    if gated_blocks(model):
        languages = (ENGLISH, place.subject.second)
        shares = tuple(_shut(model, place.examination.rows[language, "test"]) for language in languages)
    return Scores(old, new, divergence=place.divergence(model), shut=shares)


def _shut(model: Any, rows: Tensor) -> float:
    """Share of the tokens at which every gate is exactly zero."""
    shares = []
    for part in rows.split(SHUT_ROWS):
        with torch.inference_mode(), mixed(model.device.type), keeping_scores(model):
            model(input_ids=part.to(model.device), use_cache=False)
            shares.append((opened(torch.cat(take_scores(model), -1)) == 0).all(-1))
    return float(torch.cat(shares).double().mean())


def _learn(place: Place, model: Any, key: Key, shares: Sequence[float], taken: list[float]) -> Iterator[Point]:
    size = place.size
    batches = place.rows(key.tokens, key.seed).to(place.device).split(size.rows)
    take_step = stepping(model, key.rate, len(batches))
    rehearsal = place.rehearsal(key.rehearse, key.seed)
    keep_gate_scores(model)
    measured = {round(share * len(batches)) for share in shares}
    yield _point(place, model, 0)
    for step, batch in enumerate(batches):
        started = time.process_time()
        with mixed(place.device.type):
            loss = model(input_ids=batch, labels=batch).loss
        with_gates(loss, model, batch, is_new=True).backward()
        if rehearsal is not None:
            loss, read = key.weight * rehearsal.loss(model, step), batch.new_ones(rehearsal.together, size.context)
            with_gates(loss, model, read, is_new=False).backward()
        take_step()
        taken.append(time.process_time() - started)
        if step + 1 in measured:
            yield _point(place, model, (step + 1) * size.rows * size.context)


def _point(place: Place, model: Any, tokens: int) -> Point:
    model.eval()
    old, new = place.examination.read(model, "dev")
    model.train()
    return Point(tokens, old.nats, new.nats)
