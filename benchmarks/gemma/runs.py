"""One run of benchmarks/gemma: a method learns both texts, and is asked about what it learned and what it knew."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.biography.methods import whole
from benchmarks.device import watched
from benchmarks.gemma.asking import LONGEST, answers
from benchmarks.gemma.asking import TOGETHER as ASKED_TOGETHER
from benchmarks.gemma.choose_probes import PROBES, SECONDS
from benchmarks.gemma.methods import Method
from benchmarks.gemma.texts import LENGTH, SECOND, held_out_rows, learned_rows, paraphrased
from benchmarks.harness import keep_gate_scores, learn, rehearse, stepping
from benchmarks.language.packages import ENGLISH
from benchmarks.language.text import write_texts
from scale_surgery.biographies import people
from scale_surgery.evidence.greedy import Prompts
from scale_surgery.evidence.probe_file import EncodedProbes, Probe, read_probes
from scale_surgery.evidence.probe_scores import ProbeAnswer, ask_probes, judge, score_answers
from scale_surgery.progress import no_progress, no_track
from scale_surgery.text.beginnings import begin_texts
from scale_surgery.text.tokenizing import pack, start_tokens
from scale_surgery.training.allocator import keep_freed_memory
from scale_surgery.training.base_samples import sample_texts
from scale_surgery.training.sampling import Sampling

# rows of held-out text, and the sequences of a batch when it is read
HELD_OUT, TOGETHER = 32, 4
# probes of a group, the first ones of the file
OF_GROUP = 60


@dataclass(frozen=True)
class Settings:
    """Settings that all runs share.

    Attributes:
        people: People to learn.
        passes: How often each is told and asked about.
        tokens: Tokens of documentation, read once.
        rows: Rows of 128 tokens in a batch.
        rehearsed: Rows that the base wrote beside each batch.
        samples: Rows of 128 tokens that the base writes.
        weight: Weight of the divergence on them.
    """

    people: int = 8
    passes: int = 16
    tokens: int = 6_144
    rows: int = 3
    rehearsed: int = 1
    samples: int = 100
    weight: float = 1.0


@dataclass(frozen=True)
class Key:
    """Settings that no other run has."""

    method: str
    rehearses: bool
    rate: float
    seed: int
    settings: Settings


@dataclass(frozen=True)
class Scores:
    """Scores of a model.

    Attributes:
        people: Share of right answers about the people, asked in other words than in training.
        second: Nats per token of held-out documentation of the kind that was learned.
        english: Nats per token of held-out documentation in English.
        kept: Share of the probes of each group that are answered as the base does, or right.
    """

    people: float
    second: float
    english: float
    kept: dict[str, float]


@dataclass(frozen=True)
class Run:
    """A run that has ended: its trained parameters, median step, peak of anonymous memory, and processor hours.

    `routed` are the scores with the router, if the method has one.
    """

    key: Key
    parameters: int
    tokens: int
    step_seconds: float
    peak_bytes: int
    hours: float
    scores: Scores
    routed: Scores | None = None


class Place:
    """A base, its texts and probes, once for all runs of a process."""

    def __init__(self, base: Path, work: Path, settings: Settings) -> None:
        self.base, self.work, self.settings = base, work, settings
        write_texts(work, SECOND)
        self.tokenizer = AutoTokenizer.from_pretrained(base)
        self.group = people(settings.people)
        self.probes = _first(read_probes(PROBES, run_python=True))
        self.asked = _first(paraphrased(self.group))
        self.held_out = {
            language: held_out_rows(work, self.tokenizer, language, HELD_OUT) for language in (ENGLISH, SECOND)
        }

    def rows(self, seed: int) -> Tensor:
        """Return the rows to learn."""
        settings = self.settings
        return learned_rows(self.work, self.tokenizer, self.group, settings.passes, settings.tokens, seed)

    @cached_property
    def samples(self) -> Tensor:
        """Rows that the base writes from its begin token at temperature 1, the same in all runs."""
        file = self.work / f"samples-{self.settings.samples}.pt"
        if not file.exists():
            sampling = Sampling(self.settings.samples, LENGTH, 1.0, seed=0)
            begins = begin_texts(self.tokenizer, self.base.name)
            texts = sample_texts(whole(self.base, 0).eval(), begins, sampling, no_track)
            packed = pack(texts, LENGTH, start_tokens(self.tokenizer))
            rows = (packed[place]["input_ids"].long() for place in range(len(packed)))
            torch.save(torch.stack([row for row in rows if len(row) == LENGTH]), file)
        return torch.load(file, weights_only=True)

    def score(self, model: Any, *, samples: bool = False) -> Scores:
        """Score a model; with samples, its answers are drawn at temperature 1."""
        model.eval()
        ask = _sampled if samples else share_of_right
        people, kept = (ask(model, self.tokenizer, probes) for probes in (self.asked, self.probes))
        nats = {language: nats_per_token(model, rows) for language, rows in self.held_out.items()}
        return Scores(people["people"], nats[SECOND], nats[ENGLISH], kept)


def share_of_right(model: Any, tokenizer: Any, probes: Sequence[Probe]) -> dict[str, float]:
    """Return the share of right answers in each group of probes."""
    ids = tuple(tuple(tokenizer(probe.prompt)["input_ids"]) for probe in probes)
    encoded = EncodedProbes(probes, Prompts(ids, (LONGEST,) * len(ids), tokenizer))
    return _shares(ask_probes(model, encoded, ASKED_TOGETHER, SECONDS, no_progress).answers)


def _sampled(model: Any, tokenizer: Any, probes: Sequence[Probe]) -> dict[str, float]:
    given = answers(model, tokenizer, [probe.prompt for probe in probes], samples=True)
    return _shares([judge(probe, said.text, SECONDS) for probe, said in zip(probes, given, strict=True)])


def _first(probes: Sequence[Probe]) -> list[Probe]:
    """Return the first probes of each group."""
    groups: dict[str, list[Probe]] = {}
    for probe in probes:
        groups.setdefault(probe.group, []).append(probe)
    return [probe for some in groups.values() for probe in some[:OF_GROUP]]


def _shares(given: Sequence[ProbeAnswer]) -> dict[str, float]:
    return {count.group: count.share for count in score_answers(given).groups}


def nats_per_token(model: Any, rows: Tensor) -> float:
    """Return the mean loss of rows."""
    with torch.inference_mode():
        losses = [float(model(input_ids=part, labels=part, use_cache=False).loss) for part in rows.split(TOGETHER)]
    return sum(losses) / len(losses)


def run(place: Place, method: Method, key: Key) -> Run:
    """Train one model, and score it."""
    keep_freed_memory()
    started = time.process_time()
    with watched() as peaks:
        model = method.make(place.base, key.seed)
        rows = place.rows(key.seed)
        parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        with alone(model, method):
            seconds = train(place, model, key, rows)
    with alone(model, method):
        scores = place.score(model)
    routed = place.score(model) if method.is_routed else None
    hours = (time.process_time() - started) / 3600
    return Run(key, parameters, rows.numel(), round(median(seconds), 2), max(peaks), round(hours, 3), scores, routed)


def alone(model: Any, method: Method) -> AbstractContextManager[Any]:
    """Run the expansion of a routed method without its router."""
    return model.routing_disabled() if method.is_routed else nullcontext()  # type: ignore[no-any-return]


def run_base(place: Place, *, samples: bool) -> Run:
    """Score the base, which learns nothing; with samples, to show how much two samples of one model differ."""
    key = Key("base, sampled" if samples else "base", False, 0.0, 0, place.settings)
    return Run(key, 0, 0, 0.0, 0, 0.0, place.score(whole(place.base, 0), samples=samples))


def train(place: Place, model: Any, key: Key, rows: Tensor) -> list[float]:
    """Train a model in place; return the seconds of its steps."""
    settings, batches = place.settings, rows.split(place.settings.rows)
    take_step = stepping(model, key.rate, len(batches))
    base = whole(place.base, 0).requires_grad_(False).eval() if key.rehearses else None
    taken: list[float] = []
    keep_gate_scores(model)
    model.train()
    for step, batch in enumerate(batches):
        started = time.perf_counter()
        learn(model, batch)
        if base is not None:
            places = [(step * settings.rehearsed + row) % len(place.samples) for row in range(settings.rehearsed)]
            rehearse(model, base, place.samples[places], settings.weight)
        take_step()
        taken.append(time.perf_counter() - started)
    return taken
