"""Answers of models to instructions: how many end, repeat themselves, or are in another language than the base's.

ends      the model generates a token that ends an answer within the limit
repeats   the answer ends with one passage three times in a row or more, 30 characters or more in all, or 100 without
          letters, as in a rule of dashes; the numbers of lines and the kind of blanks do not count. A refrain in the
          middle is none, nor is a row of numbers.
language  by letters and by frequent words, see `languages`: answers of which these do not decide it are not compared
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery.checkpoint.records import open_record
from scale_surgery.evidence.eval_targets import Subject
from scale_surgery.evidence.greedy import Prompts, Said, answer_greedily
from scale_surgery.evidence.languages import are_different, language_of
from scale_surgery.progress import Progress
from scale_surgery.running.tokenizer import check_token_ids
from scale_surgery.text.beginnings import Beginnings, find_beginnings

if TYPE_CHECKING:
    from accelerate import PartialState

NUMBERING, BLANKS = re.compile(r"^\W*\d+", re.MULTILINE), re.compile(r"\s+")
# a passage at the end, so many times in a row, with so many characters in all, with letters in it and without
TIMES, CHARACTERS, OF_SIGNS = 3, 30, 100


@dataclass(frozen=True)
class GivenAnswer:
    """The answer of a model to an instruction.

    Attributes:
        number: Number of the instruction, from 1.
        text: The generated text.
        ended: True if the model ended it within the limit.
        repeats: True if it repeats itself.
        language: Its language, or its script if that does not decide it; empty without letters.
    """

    number: int
    text: str
    ended: bool
    repeats: bool
    language: str


@open_record  # its JSON also has shares
@dataclass(frozen=True)
class AnswerScore:
    """The answers of a model to instructions.

    Attributes:
        asked: Number of instructions.
        ended: Number of answers that end within the limit.
        repeating: Number of answers that repeat themselves.
        compared: Number of answers whose language is known, as is that of the base's answer to the same instruction;
            None without a base.
        other_language: Number of these in another language than the base's; None without a base.
        is_chat: True if a chat template asked for them; False if the model continued the instructions as plain text.
        answers: The answers.
    """

    asked: int
    ended: int
    repeating: int
    compared: int | None
    other_language: int | None
    is_chat: bool
    answers: tuple[GivenAnswer, ...]

    @property
    def ended_share(self) -> float:
        """Share of answers that end within the limit, from 0 to 1."""
        return self.ended / self.asked

    @property
    def repeating_share(self) -> float:
        """Share of answers that repeat themselves, from 0 to 1."""
        return self.repeating / self.asked

    @property
    def other_share(self) -> float | None:
        """Share of compared answers in another language than the base's; None without any."""
        return self.other_language / self.compared if self.compared and self.other_language is not None else None

    def to_json(self) -> dict[str, Any]:
        """Return the score as plain JSON values, with the shares."""
        shares = {name: getattr(self, name) for name in ("ended_share", "repeating_share", "other_share")}
        return asdict(self) | shares

    def against(self, base: AnswerScore) -> AnswerScore:
        """Return the score with the answers in another language than those of the base."""
        return score_given(self.answers, base.answers, is_chat=self.is_chat)


def score_given(
    answers: Sequence[GivenAnswer], base: Sequence[GivenAnswer] | None = None, *, is_chat: bool
) -> AnswerScore:
    """Count answers; `base` has those of the base, to the same instructions or to some of them."""
    compared = other = None
    if base is not None:
        languages = {answer.number: answer.language for answer in base}
        found = [are_different(answer.language, languages.get(answer.number, "")) for answer in answers]
        compared, other = len(found) - found.count(None), found.count(True)
    return AnswerScore(
        asked=len(answers),
        ended=sum(answer.ended for answer in answers),
        repeating=sum(answer.repeats for answer in answers),
        compared=compared,
        other_language=other,
        is_chat=is_chat,
        answers=tuple(answers),
    )


@dataclass(frozen=True)
class EncodedInstructions:
    """Instructions in the tokens of a model."""

    begins: Beginnings
    prompts: Prompts


def encode_instructions(name: str | Path, subject: Subject, tokenizer: Any, new_tokens: int) -> EncodedInstructions:
    """Encode instructions for a model: by its chat template, or as plain text if it has none."""
    begins = find_beginnings(tokenizer, subject.name, subject.context, str(name))
    check_token_ids(subject.name, begins.highest, subject.vocabulary, "an instruction")
    rooms = [new_tokens if subject.context is None else subject.context - length for length in begins.lengths]
    lengths = [min(new_tokens, room) for room in rooms]
    return EncodedInstructions(begins, Prompts(begins.ids, lengths, tokenizer, begins.ends))


def ask_instructions(
    model: Any,
    encoded: EncodedInstructions,
    batch_size: int,
    advance: Progress,
    processes: PartialState | None = None,
) -> AnswerScore:
    """Generate the answers of a model greedily, and count them."""
    asked = encoded.begins.asked or ()

    def judge(place: int, said: Said) -> GivenAnswer:
        text = said.text
        return GivenAnswer(asked[place].number, text, said.ended, repeats_itself(text), language_of(text))

    given = answer_greedily(model, encoded.prompts, judge, batch_size, advance, processes)
    return score_given(given, is_chat=encoded.begins.is_chat)


def repeats_itself(text: str) -> bool:
    """Return True if a text ends with one passage several times in a row; the last time may be cut."""
    # the lines of a loop may be numbered
    return _has_loop(text) or _has_loop(NUMBERING.sub("0", text))


def _has_loop(text: str) -> bool:
    # the blank at the end is that of the last passage, which may be whole
    backwards = f"{BLANKS.sub(' ', text).strip()} "[::-1]
    return any(_ends_with_loop(some) for some in (backwards, backwards[1:]))


def _ends_with_loop(backwards: str) -> bool:
    for period in range(1, len(backwards) // TIMES + 1):
        characters = CHARACTERS if any(map(str.isalpha, backwards[:period])) else OF_SIGNS
        least = max(TIMES * period, characters)
        if backwards[period:least] == backwards[: least - period]:
            return True
    return False
