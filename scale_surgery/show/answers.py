"""What a model says, as it comes: tokens marked by the path that they came from, and two answers side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from scale_surgery.show.layout import GAP, Facts, sentence
from scale_surgery.show.path_colours import Bracketed, Coloured, Colouring, Legend, has_colour, path_styles
from scale_surgery.show.visible import visible_text

if TYPE_CHECKING:
    from scale_surgery.talking.records import Look

# a column of less than this is no text any more
LEAST_COLUMN = 20

# weight of each path; None where nothing is known of a token
Weights = Sequence[float] | None
# how the paths of tokens are shown
Marking = Literal["colours", "brackets", "nothing"]


def choose_marking(console: Console, look: Look) -> Marking:
    """How the paths of a routed model's tokens are shown.

    Args:
        console: Where.
        look: What was asked for.
    """
    has_colours = has_colour(console)
    if look.paths is False or (look.paths is None and not has_colours):
        return "nothing"
    return "colours" if has_colours else "brackets"


def render_opening(
    name: str, rows: Sequence[tuple[str, str]], marking: Marking, colouring: Colouring | None = None
) -> RenderableType:
    """Who answers and how, above a conversation, and what the marks mean."""
    facts = Facts(name, rows)
    if colouring is None or marking == "nothing":
        return Group(facts, Text())
    return Group(facts, Legend(colouring, is_plain=marking == "brackets"), Text())


class Marks(Protocol):
    """Makes visible where tokens came from, one after the other."""

    def mark(self, text: str, weights: Weights) -> Text:
        """Show the next token, given the weights of the paths that it came from."""

    def end(self) -> Text:
        """Show that no token follows."""


class Unmarked:
    """Shows tokens as text alone."""

    def mark(self, text: str, weights: Weights) -> Text:
        """The token."""
        return Text(visible_text(text))

    def end(self) -> Text:
        """Nothing."""
        return Text()


def make_marks(console: Console, marking: Marking, colouring: Colouring | None) -> Marks:
    """Make what shows the paths of one text's tokens."""
    if colouring is None or marking == "nothing":
        return Unmarked()
    return Bracketed(colouring.names) if marking == "brackets" else Coloured(colouring, path_styles(console))


class SideBySide:
    """Texts in columns that fit the terminal, or one below the other where it is too narrow."""

    def __init__(self, names: Sequence[str], texts: Sequence[Text], *, is_growing: bool = False) -> None:
        """Put texts side by side.

        Args:
            names: What stands above each.
            texts: The texts.
            is_growing: Whether they are still being said: then their last lines are shown, as many as fit.
        """
        self.names, self.texts, self.is_growing = names, texts, is_growing

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        width = (options.max_width - GAP * (len(self.texts) - 1)) // len(self.texts)
        if width < LEAST_COLUMN and not self.is_growing:
            for name, text in zip(self.names, self.texts, strict=True):
                yield sentence(name, "bold")
                yield text
            return
        table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
        for name in self.names:
            table.add_column(sentence(name), width=max(1, width), overflow="fold")
        # a heading, and a line for the cursor
        most = max(1, console.size.height - 3) if self.is_growing else None
        table.add_row(*(self._fit(console, text, max(1, width), most) for text in self.texts))
        yield table

    def _fit(self, console: Console, text: Text, width: int, most: int | None) -> Text:
        if most is None:
            return text
        return Text("\n").join(text.wrap(console, width, overflow="fold")[-most:])
