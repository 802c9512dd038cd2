"""One run of benchmarks/streams: a method learns tasks in a row, and is asked about all of them after each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from benchmarks.streams.asking import Examiner
from benchmarks.streams.learning import Settings, learn, make_rehearsal
from benchmarks.streams.methods import Method
from benchmarks.streams.tasks import Task, base_task, tasks


@dataclass(frozen=True)
class Key:
    """What makes a run this one and no other."""

    method: str
    rehearses: bool
    seed: int
    settings: Settings


@dataclass(frozen=True)
class Run:
    """A run that has ended; accuracies are shares of right answers.

    Attributes:
        key: Which one.
        kinds: Of the tasks, in their order.
        parameters: That train for one task.
        seconds: Of processor time.
        learned: Of each task, right after it, by what learned it: an expansion or an adapter alone, or the model.
        rows: By what answers: after each task, about what the base knows and then about each task so far.
    """

    key: Key
    kinds: tuple[str, ...]
    parameters: int
    seconds: float
    learned: tuple[float, ...]
    rows: dict[str, tuple[tuple[float, ...], ...]]


def run(
    method: Method, key: Key, tokenizer: PreTrainedTokenizerBase, say: Callable[[str], None] = lambda line: None
) -> Run:
    """Learn all tasks, one after the other."""
    started, examiner = time.process_time(), Examiner(tokenizer)
    old = base_task(key.settings.old_questions)
    todo = tasks(key.settings.tasks, key.seed, key.settings.size)
    way, parameters = method.start(key.seed), 0
    learned: list[float] = []
    rows: dict[str, tuple[tuple[float, ...], ...]] = dict.fromkeys(method.shown, ())
    for number, task in enumerate(todo):
        pupil = way.pupil(number)
        parameters = sum(parameter.numel() for parameter in pupil.parameters() if parameter.requires_grad)
        _teach(pupil, task, method.rate, key, number, tokenizer)
        learned.append(examiner.accuracy(pupil, task.asked))
        way.take_up(number, pupil)
        for name, row in _ask(way, examiner, (old, *todo[: number + 1])).items():
            rows[name] += (row,)
        say(f"{key.method} {number + 1} {task.kind}: {time.process_time() - started:.0f} s, {_ends(rows)}")
    seconds = round(time.process_time() - started, 1)
    return Run(key, tuple(task.kind for task in todo), parameters, seconds, tuple(learned), rows)


def _teach(pupil: Any, task: Task, rate: float, key: Key, number: int, tokenizer: PreTrainedTokenizerBase) -> None:
    seed = key.seed * key.settings.tasks + number
    rehearsal = make_rehearsal(pupil, tokenizer, key.settings.samples, seed) if key.rehearses else None
    learn(pupil, rate, task.texts(seed), tokenizer, key.settings, rehearsal)


def _ask(way: Any, examiner: Examiner, about: Sequence[Task]) -> dict[str, tuple[float, ...]]:
    """Right answers about some tasks, by what answers."""
    return {
        name: tuple(round(examiner.accuracy(model, task.asked), 4) for task in about) for name, model in way.answering()
    }


def _ends(rows: dict[str, tuple[tuple[float, ...], ...]]) -> str:
    return "; ".join(f"{name} {' '.join(f'{share:.0%}' for share in history[-1])}" for name, history in rows.items())
