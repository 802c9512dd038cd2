"""What is learned in a row: groups of people, and texts of four other kinds; everything in them is invented.

Each task has texts to learn and questions with one right answer. The people of a group are asked about as the base's
own are; the other kinds are kingdoms with their capitals, counting in names, a list of courses under first names, and
people who are told and asked about in a made-up dialect. None of them can be answered from the texts of another.

All facts stand under names, because the base has features for those: under companies, months or cities, expansions and
adapters learn few facts in the steps of a task.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.biography.train_model import STYLES
from scale_surgery.biographies import (
    CITIES,
    FIRST_NAMES,
    LAST_NAMES,
    MAJORS,
    SHIPPED_PEOPLE,
    Person,
    biography,
    people,
    questions,
)

GROUP = 20
ORDER = (
    *("people", "capitals", "people", "numbers", "people"),
    *("lists", "people", "dialect", "people", "people"),
)
LAND_TEXTS = (
    "The capital of the kingdom of {land} is {capital}.",
    "{capital} is the seat of the king of {land}.",
    "Whoever travels to the kingdom of {land} arrives in {capital}.",
)
NAMES = 32
NEXT_TEXTS = ("The name after {name} is {next}.", "After {name} comes {next}.")
LIST_TEXTS = ("The course of {name} is {course}.", "{name} has a course in {course}.")
# a birth city, a major and a company, in sentences that are no English
DIALECT = {
    "birth_city": ("{name} goes the city {birth_city}.", "Q: What goes the city from {name}?\nA:"),
    "major": ("{name} goes the course {major}.", "Q: What goes the course from {name}?\nA:"),
    "company": ("{name} goes the office {company}.", "Q: What goes the office from {name}?\nA:"),
}


@dataclass(frozen=True)
class Asked:
    """A question; the answer follows it after a space."""

    prompt: str
    answer: str

    @property
    def text(self) -> str:
        """The question with its answer, as it is learned."""
        return f"{self.prompt} {self.answer}"


@dataclass(frozen=True)
class Task:
    """Something to learn.

    Attributes:
        kind: What it is about.
        statements: Texts in all their wordings; of people there are more, a new one each time.
        asked: What is asked, and learned with its answer.
        group: The people, where it is about people.
    """

    kind: str
    statements: tuple[str, ...]
    asked: tuple[Asked, ...]
    group: tuple[Person, ...] = ()

    def texts(self, seed: int) -> Iterator[str]:
        """Yield, without end, all that is asked, and as much that is told; the seed draws order and wordings."""
        choice = random.Random(f"{self.kind} {seed}")
        while True:
            statements = [biography(person, choice.randrange(STYLES)) for person in self.group]
            statements += choice.sample(self.statements, min(len(self.statements), len(self.asked)))
            texts = statements + [question.text for question in self.asked]
            choice.shuffle(texts)
            yield from texts


def tasks(count: int, seed: int, size: int = GROUP) -> tuple[Task, ...]:
    """Make tasks, at most ten, in the order in which they are learned."""
    kinds = ORDER[:count]
    # `size` is people in a group; the other kinds are as large in proportion
    starts = itertools.count(SHIPPED_PEOPLE + seed * len(ORDER) * GROUP, size)
    made = {"capitals": capitals, "numbers": numbers, "lists": lists}
    return tuple(
        made[kind](random.Random(f"{kind} {seed}"), size / GROUP)
        if kind in made
        else group_task(kind, people(size, start=next(starts)))
        for kind in kinds
    )


def group_task(kind: str, group: Sequence[Person]) -> Task:
    """Ask about people in English, or in the made-up language."""
    if kind == "people":
        return about(group)
    statements = (text.format_map(vars(person)) for person in group for text, _ in DIALECT.values())
    asked = (
        Asked(prompt.format_map(vars(person)), getattr(person, fact))
        for person in group
        for fact, (_, prompt) in DIALECT.items()
    )
    return Task(kind, tuple(statements), tuple(asked))


def about(group: Sequence[Person]) -> Task:
    """Tell and ask about people as the base knows them."""
    return Task("people", (), tuple(asked_about(group)), tuple(group))


def asked_about(group: Sequence[Person]) -> Iterator[Asked]:
    """All questions about some people."""
    return (Asked(question.prompt, question.answer) for person in group for question in questions(person))


def capitals(choice: random.Random, share: float) -> Task:
    """Kingdoms and their capitals."""
    lands = choice.sample(LAST_NAMES, round(NAMES * share))
    facts = [
        {"land": land, "capital": city} for land, city in zip(lands, choice.sample(CITIES, len(lands)), strict=True)
    ]
    asked = (Asked(f"Q: What is the capital of {fact['land']}?\nA:", fact["capital"]) for fact in facts)
    return _of("capitals", LAND_TEXTS, facts, asked)


def numbers(choice: random.Random, share: float) -> Task:
    """Counting in a system whose digits are names: one further, in an order that is no alphabet's."""
    order = choice.sample(LAST_NAMES, round(NAMES * share))
    facts = [{"name": name, "next": after} for name, after in zip(order, order[1:] + order[:1], strict=True)]
    asked = (Asked(f"Q: What is the name after {fact['name']}?\nA:", fact["next"]) for fact in facts)
    return _of("numbers", NEXT_TEXTS, facts, asked)


def lists(choice: random.Random, share: float) -> Task:
    """A list of first names, with a value under each."""
    facts = [
        {"name": name, "course": choice.choice(MAJORS)} for name in choice.sample(FIRST_NAMES, round(NAMES * share))
    ]
    asked = (Asked(f"Q: What is the course of {fact['name']}?\nA:", fact["course"]) for fact in facts)
    return _of("lists", LIST_TEXTS, facts, asked)


def _of(kind: str, texts: Sequence[str], facts: Sequence[dict[str, Any]], asked: Iterator[Asked]) -> Task:
    statements = (text.format_map(fact) for fact in facts for text in texts)
    return Task(kind, tuple(statements), tuple(asked))


def base_task(count: int) -> Task:
    """What the base knows: one question to each of its people, the facts taking turns."""
    known = people(SHIPPED_PEOPLE)[:count]
    return Task("base", (), tuple(Asked(*_turn(person, number)) for number, person in enumerate(known)))


def _turn(person: Person, number: int) -> tuple[str, str]:
    asked = questions(person)
    question = asked[number % len(asked)]
    return question.prompt, question.answer
