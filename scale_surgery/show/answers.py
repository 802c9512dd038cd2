"""Answers during generation: tokens marked by their path, and two answers in columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from scale_surgery.errors import counted
from scale_surgery.show.console import Output
from scale_surgery.show.layout import GAP, Facts, sentence
from scale_surgery.show.path_colours import Legend, Marking, PathMarks, choose_colours, has_colour

if TYPE_CHECKING:
    from scale_surgery.talking.records import Generation, Look, StreamedToken, Token


def choose_marking(console: Console, look: Look) -> Marking:
    """Choose the marks by which a console shows the paths of tokens."""
    has_colours = has_colour(console)
    if look.paths is False or (look.paths is None and not has_colours):
        return "nothing"
    return "colours" if has_colours else "brackets"


def render_legend(paths: Sequence[str], marking: Marking) -> list[RenderableType]:
    """Return the legend of the path marks; empty if there are none."""
    if not paths or marking == "nothing":
        return []
    return [Legend(choose_colours(paths), is_plain=marking == "brackets")]


def render_opening(
    name: str, rows: Sequence[tuple[str, str]], paths: Sequence[str], marking: Marking
) -> RenderableType:
    """Return the lines above a conversation: model, settings, and the legend of paths."""
    return Group(Facts(name, rows), *render_legend(paths, marking), Text())


class SideBySide:
    """Texts in columns of equal width. While they grow, only the last lines that fit are shown."""

    def __init__(self, names: Sequence[str], texts: Sequence[Text], *, is_growing: bool = False) -> None:
        self.names, self.texts, self.is_growing = names, texts, is_growing

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        width = max(1, (options.max_width - GAP * (len(self.texts) - 1)) // len(self.texts))
        table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
        for name in self.names:
            table.add_column(sentence(name), width=width, overflow="fold")
        # minus the heading and the line of the cursor
        most = max(1, console.size.height - 3) if self.is_growing else 0
        table.add_row(*(Text("\n").join(text.wrap(console, width, overflow="fold")[-most:]) for text in self.texts))
        yield table


class AnswerScreen:
    """A view of a growing answer, or of the base's and the model's answers in two columns."""

    def __init__(self, out: Output, marking: Marking, names: Sequence[str], paths: Sequence[str]) -> None:
        self.out, self.names = out, names
        colouring = choose_colours(paths) if paths else None
        self.marks = [PathMarks(out.results, marking, colouring) for _ in names]
        self.texts = [Text() for _ in names]
        self.stack = ExitStack()
        self.draw: Callable[[Any], None] | None = None

    def add(self, token: Token, place: int = 0) -> None:
        """Show the next token of an answer."""
        part = self.marks[place].mark(token.text, token.weights)
        if len(self.names) == 1:
            self.out.stream(part)
            return
        if self.draw is None:
            self.draw = self.stack.enter_context(self.out.redrawn())
        self.texts[place].append_text(part)
        self.draw(SideBySide(self.names, self.texts, is_growing=True))

    def end(self) -> None:
        """Finish the answers: close open marks and end the line."""
        self.stack.close()
        for text, marks in zip(self.texts, self.marks, strict=True):
            text.append_text(marks.end())
        if len(self.names) == 1:
            self.out.stream(self.texts[0] + Text("\n"))
        else:
            self.out.show_part(SideBySide(self.names, self.texts))


class AnswerPrinter:
    """A printer of answers to independent prompts, one below the other."""

    def __init__(self, out: Output, model: str, prompts: Sequence[str], look: Look, *, compare: bool) -> None:
        self.out, self.prompts = out, prompts
        self.marking = choose_marking(out.results, look)
        self.names = ["base", "expanded"] if compare else [model]
        self.place = -1

    def __call__(self, streamed: StreamedToken) -> None:
        """Show the next token."""
        if streamed.prompt != self.place:
            self._end_answer()
            self.place = streamed.prompt
            self.screen = AnswerScreen(self.out, self.marking, self.names, streamed.paths)
            if len(self.prompts) > 1:
                self.out.show_part(sentence(self.prompts[streamed.prompt], "bold"))
        self.screen.add(streamed.token, 0 if streamed.is_base else len(self.names) - 1)

    def end(self, result: Generation) -> None:
        """End the last answer, explain the marks, and print warnings."""
        self._end_answer()
        for legend in render_legend(result.paths, self.marking):
            self.out.say(Group(Text(), legend))
        if not (result.has_template or result.settings.raw):
            self.out.warn(f"{result.model} has no chat template. The prompt was continued as plain text.")
        full = sum(answer.ended == "context" for answer in result.answers)
        if full:
            self.out.warn(
                f"{full} of {counted(len(result.answers), 'answer')} ended because the model's context is full."
            )

    def _end_answer(self) -> None:
        if self.place >= 0:
            self.screen.end()
            if self.place < len(self.prompts) - 1:
                self.out.show_part("")
