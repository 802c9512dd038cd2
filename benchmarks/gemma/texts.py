"""What a run on Gemma learns, and what is held out: invented people, and documentation of a kind that it reads badly.

Training asks about each person in the words of `scale_surgery.biographies`, and tells biographies in many styles. The
questions that are scored ask the same in other words, which no training text has.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.language.text import read_text
from scale_surgery.biographies import Person, biography, people, questions
from scale_surgery.evidence.probe_file import Probe

# chosen of the languages of the packages by the base's perplexity: see README.md
SECOND = "ko"
LENGTH = 128
PARAPHRASES = {
    "birthday": "Q: On which day was {} born?\nA:",
    "birth_city": "Q: In which city was {} born?\nA:",
    "university": "Q: Where did {} study?\nA:",
    "major": "Q: Which subject did {} study?\nA:",
    "company": "Q: Who employs {}?\nA:",
    "company_city": "Q: In which city is the office of {}?\nA:",
}


def learned_rows(work: Path, tokenizer: Any, group: Sequence[Person], passes: int, tokens: int, seed: int) -> Tensor:
    """Return rows (rows, 128) of both texts, packed and shuffled: people in some passes, documentation once."""
    documents = read_text(work, SECOND, "train")
    random.Random(seed).shuffle(documents)
    rows = torch.cat((people_rows(tokenizer, group, passes, seed), pack(tokenizer, documents, tokens // LENGTH)))
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]


def people_rows(tokenizer: Any, group: Sequence[Person], passes: int, seed: int) -> Tensor:
    """Return rows (rows, 128) of questions and biographies, in some passes."""
    choice = random.Random(seed)
    asked = [question.text for person in group for question in questions(person)]
    texts = [
        *asked * passes,
        *(biography(person, choice.randrange(100_000)) for _ in range(passes) for person in group),
    ]
    choice.shuffle(texts)
    return pack(tokenizer, texts)


def pack(tokenizer: Any, texts: Sequence[str], most: int | None = None) -> Tensor:
    """Pack texts end to end into rows of 128 tokens, at most so many; what fills no row is left out.

    Each row begins with the token that starts a text: without it, Gemma predicts much worse.
    """
    stream: list[int] = []
    for text in texts:
        stream += [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        if most is not None and len(stream) >= most * LENGTH:
            break
    count = min(len(stream) // LENGTH, most or len(stream))
    rows = torch.tensor(stream[: count * LENGTH]).view(count, LENGTH)
    rows[:, 0] = tokenizer.bos_token_id
    return rows


def held_out_rows(work: Path, tokenizer: Any, language: str, rows: int) -> Tensor:
    """Return rows of documentation that no run learns."""
    return pack(tokenizer, read_text(work, language, "test"), rows)


def paraphrased(group: Sequence[Person]) -> list[Probe]:
    """Return the questions in other words; the form is shown by two people who are not asked about."""
    shown = people(2, start=2000)
    return [
        Probe(_example(shown, attribute) + form.format(person.name), "exact", getattr(person, attribute), "people")
        for person in group
        for attribute, form in PARAPHRASES.items()
    ]


def _example(shown: Sequence[Person], attribute: str) -> str:
    form = PARAPHRASES[attribute]
    return "".join(f"{form.format(person.name)} {getattr(person, attribute)}\n\n" for person in shown)
