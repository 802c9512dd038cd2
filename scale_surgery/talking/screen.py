"""Answers on a screen, while they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from rich.text import Text

from scale_surgery.errors import counted
from scale_surgery.show.answers import Marking, SideBySide, choose_marking, make_marks
from scale_surgery.show.console import Output
from scale_surgery.show.layout import sentence
from scale_surgery.show.path_colours import Colouring, Legend, choose_colours
from scale_surgery.talking.records import Generation, Look, Said, Token


class Screen:
    """Shows answers as they come: one as text that goes on, that of the base and that of the model side by side."""

    def __init__(self, out: Output, marking: Marking, names: Sequence[str], colouring: Colouring | None = None) -> None:
        """Prepare for answers.

        Args:
            out: Where they are shown.
            marking: How the paths of a routed model's tokens are shown.
            names: Who answers: the model, or its base and the model.
            colouring: Colours of the paths of a routed model.
        """
        self.out, self.marking, self.names, self.colouring = out, marking, names, colouring
        self.stack = ExitStack()
        self._begin()

    def _begin(self) -> None:
        self.marks = [make_marks(self.out.results, self.marking, self.colouring) for _ in self.names]
        self.texts = [Text() for _ in self.names]
        self.draw: Callable[[Any], None] | None = None

    def colour(self, paths: Sequence[str]) -> None:
        """Give each path a colour, before the first token."""
        self.colouring = choose_colours(paths)
        self._begin()

    def add(self, token: Token, place: int = 0) -> None:
        """Show the next token of one of them."""
        part = self.marks[place].mark(token.text, token.weights)
        if len(self.names) == 1:
            self.out.stream(part)
            return
        if self.draw is None:
            self.draw = self.stack.enter_context(self.out.redrawn())
        self.texts[place].append_text(part)
        self.draw(SideBySide(self.names, self.texts, is_growing=True))

    def end(self) -> None:
        """End the answers, and begin the next ones."""
        self.stack.close()
        for text, marks in zip(self.texts, self.marks, strict=True):
            text.append_text(marks.end())
        if len(self.names) == 1:
            self.out.stream(self.texts[0] + Text("\n"))
        else:
            self.out.show_part(SideBySide(self.names, self.texts))
        self._begin()


class Teller:
    """Shows the answers to prompts that have nothing to do with each other, one below the other."""

    def __init__(self, out: Output, model: str, prompts: Sequence[str], look: Look, *, compare: bool) -> None:
        """Prepare for answers.

        Args:
            out: Where they are shown.
            model: What the model is called.
            prompts: What is asked.
            look: How answers are shown.
            compare: Whether the base answers too.
        """
        self.out, self.prompts = out, prompts
        self.screen = Screen(out, choose_marking(out.results, look), ["base", "expanded"] if compare else [model])
        self.place: int | None = None

    def __call__(self, said: Said) -> None:
        """Show the next token."""
        if said.paths and self.screen.colouring is None:
            self.screen.colour(said.paths)
        if said.place != self.place:
            self._end()
            self.place = said.place
            if len(self.prompts) > 1:
                self.out.show_part(sentence(self.prompts[said.place], "bold"))
        self.screen.add(said.token, 0 if said.is_base else len(self.screen.names) - 1)

    def end(self, result: Generation) -> None:
        """End the last answer, and say what the marks mean and what else is to be known."""
        self._end()
        if self.screen.colouring is not None and self.screen.marking != "nothing":
            self.out.say("")
            self.out.say(Legend(self.screen.colouring, is_plain=self.screen.marking == "brackets"))
        if not (result.has_template or result.settings.raw):
            self.out.warn(f"{result.model} has no chat template, so it went on with the text.")
        full = sum(answer.ended == "context" for answer in result.answers)
        if full:
            self.out.warn(
                f"{full} of {counted(len(result.answers), 'answer')} ended where the model's context is full."
            )

    def _end(self) -> None:
        if self.place is not None:
            self.screen.end()
            if len(self.prompts) > 1 and self.place < len(self.prompts) - 1:
                self.out.show_part("")
