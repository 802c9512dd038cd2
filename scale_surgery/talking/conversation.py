"""A conversation as a model reads it: by a chat template, or as one continuous text.

If it is longer than the model's context, the oldest turns are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scale_surgery.checkpoint.expansions import BASE_NAME
from scale_surgery.errors import DataError, Problem
from scale_surgery.evidence.eval_targets import Subject
from scale_surgery.running.context import check_room
from scale_surgery.running.tokenizer import check_token_ids
from scale_surgery.talking.records import Answer
from scale_surgery.talking.settings import GenerationSettings
from scale_surgery.text.beginnings import form_of

# an answer gets at least this fraction of the context, or its most tokens if they are fewer
LEFT_FOR_AN_ANSWER = 4


@dataclass(frozen=True)
class EncodedPrompt:
    """Token ids that a model reads for a message, and the number of oldest turns that did not fit into the context."""

    ids: tuple[int, ...]
    left_out: int


class Conversation:
    """The messages to one model, or to its base, with the answers."""

    def __init__(self, subject: Subject, *, has_template: bool, is_base: bool = False) -> None:
        self.subject, self.has_template, self.is_base = subject, has_template, is_base
        self.turns: list[Answer] = []
        self.before: list[Answer] = []

    def encode(self, message: str, settings: GenerationSettings) -> EncodedPrompt:
        """Return the token ids for the next message; forget turns that do not fit into the context."""
        turns, context = list(self.turns), self.subject.context
        ids = self._encode(turns, message, settings)
        while context is not None and turns and len(ids) > context - _left(context, settings):
            del turns[0]
            ids = self._encode(turns, message, settings)
        check_ids(self.subject, ids)
        left_out, self.turns = len(self.turns) - len(turns), turns
        return EncodedPrompt(tuple(ids), left_out)

    def add(self, answer: Answer) -> None:
        """Add an answer with its prompt; a text that the model ended is not continued."""
        is_over = answer.ended == "end" and not self.has_template
        self.before, self.turns = self.turns, [] if is_over else [*self.turns, answer]

    def take_back(self) -> None:
        """Forget the last answer and its prompt."""
        self.turns = self.before

    def return_to(self, turns: list[Answer]) -> None:
        """Return to earlier turns, after a message without an answer: there is nothing to take back."""
        self.turns = self.before = turns

    def clear(self) -> None:
        """Forget everything."""
        self.turns = self.before = []

    def _encode(self, turns: Sequence[Answer], message: str, settings: GenerationSettings) -> Sequence[int]:
        from scale_surgery.text.tokenizing import tokenize_prompts

        if self.has_template:
            return self._fill_template(turns, message, settings)
        return tokenize_prompts([_join(turns, message)], self._tokenizer(settings))[0]

    def _tokenizer(self, settings: GenerationSettings) -> Any:
        """Return the tokenizer of the path that answers; new tokens belong to one expansion."""
        return self.subject.tokenizer_of(BASE_NAME if self.is_base else settings.expansion)

    def _fill_template(self, turns: Sequence[Answer], message: str, settings: GenerationSettings) -> list[int]:
        history = [] if settings.system is None else [("system", settings.system)]
        for turn in turns:
            history += [("user", turn.prompt), ("assistant", turn.text)]
        messages = [{"role": role, "content": content} for role, content in (*history, ("user", message))]
        tokenizer = self._tokenizer(settings)
        try:
            form = form_of(tokenizer, messages)
        except DataError as error:
            raise DataError(Problem("chat-template-fails", self.subject.name, *error.problems)) from error
        shaped = list(map(form.shape, messages))
        filled = tokenizer.apply_chat_template(shaped, add_generation_prompt=True, return_dict=True)
        ids: list[int] = filled["input_ids"]
        return ids


def _join(turns: Sequence[Answer], message: str) -> str:
    """Join the text so far: each typed text starts a new line; an empty one continues the text."""
    text = ""
    for prompt, answer in (*((turn.prompt, turn.text) for turn in turns), (message, "")):
        text += "\n" * bool(text and prompt) + prompt + answer
    return text


def _left(context: int, settings: GenerationSettings) -> int:
    """Return the number of tokens in the context that are reserved for an answer."""
    return min(settings.max_new_tokens, max(1, context // LEFT_FOR_AN_ANSWER))


def check_ids(subject: Subject, ids: Sequence[int]) -> None:
    """Check that a model can read token ids and generate at least one more."""
    if not ids:
        raise DataError(Problem("prompt-without-token", model=subject.name))
    check_token_ids(subject.name, max(ids), subject.vocabulary)
    check_room(len(ids), subject.context, subject.name)
