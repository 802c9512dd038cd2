"""Invented people as rows of tokens: a word is a token, so that a small base spends its parameters on facts.

A row states all of a person, the attributes in an order that each row draws anew:

    <s> Adele B Abbott birth_city Rome birthday October 3 1970 ... </s>

A question is a row up to an attribute's name; the answer is the token that follows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from string import ascii_uppercase

import torch
from torch import Tensor

from scale_surgery.biographies import (
    ATTRIBUTES,
    CAPACITY,
    CITIES,
    COMPANY_CITIES,
    FIRST_NAMES,
    LAST_NAMES,
    MAJORS,
    MONTHS,
    UNIVERSITIES,
    people,
)

BEGIN, END, PAD = 0, 1, 2
SPECIAL = ("<s>", "</s>", "<pad>")
DAYS, YEARS = map(str, range(1, 29)), map(str, range(1960, 2000))
WORDS = (
    *SPECIAL,
    *ATTRIBUTES,
    *dict.fromkeys(
        (*ascii_uppercase, *FIRST_NAMES, *LAST_NAMES, *CITIES, *MAJORS, *UNIVERSITIES, *COMPANY_CITIES, *MONTHS)
    ),
    *dict.fromkeys((*DAYS, *YEARS)),
)
TOKEN = {word: token for token, word in enumerate(WORDS)}
# a middle initial makes the names of each seed of `people` other names
EVERYBODY = CAPACITY * len(ascii_uppercase)
# has no factor in common with their number: people beside each other share no initial, and old and new ones are alike
STRIDE = 7919
ROW = 19
# tokens of a question: the begin token, three of the name, the attribute
QUESTION = 5

# the name, and each attribute with its value, as tokens
Facts = tuple[list[int], list[list[int]]]


@cache
def _everybody() -> list[Facts]:
    return [
        _facts(person.name.split(" ", 1), initial, [getattr(person, attribute) for attribute in ATTRIBUTES])
        for seed, initial in enumerate(ascii_uppercase)
        for person in people(CAPACITY, seed=seed)
    ]


def _facts(names: Sequence[str], initial: str, values: Sequence[str]) -> Facts:
    first, last = names
    words = [values[0].replace(",", "").split(), *([value] for value in values[1:])]
    stated = [[TOKEN[attribute], *map(TOKEN.get, value)] for attribute, value in zip(ATTRIBUTES, words, strict=True)]
    return [TOKEN[first], TOKEN[initial], TOKEN[last]], stated  # type: ignore[return-value]


def facts(count: int, start: int = 0) -> list[Facts]:
    """Return the facts of some people; the same index is the same person in every run."""
    everybody = _everybody()
    return [everybody[index * STRIDE % EVERYBODY] for index in range(start, start + count)]


def rows(known: Sequence[Facts], together: int, choice: random.Random) -> Iterator[Tensor]:
    """Yield, without end, batches (together, 19) of people in a random order, each in a new order of attributes."""
    waiting: list[Facts] = []
    while True:
        while len(waiting) < together:
            waiting += choice.sample(known, len(known))
        yield torch.tensor([_row(name, stated, choice) for name, stated in waiting[:together]])
        waiting = waiting[together:]


def _row(name: list[int], stated: list[list[int]], choice: random.Random) -> list[int]:
    return [BEGIN, *name, *(token for value in choice.sample(stated, len(stated)) for token in value), END]


def questions(known: Sequence[Facts]) -> tuple[Tensor, Tensor]:
    """Return one question for each attribute of each person, (questions, 5), and the answers, (questions,)."""
    asked = [(*name, *value[:2]) for name, stated in known for value in stated]
    both = torch.tensor(asked)
    return torch.nn.functional.pad(both[:, :-1], (1, 0), value=BEGIN), both[:, -1]
