"""What a model says, as it comes: tokens marked by the path that they came from, and two answers side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from scale_surgery.show.layout import GAP, Facts, sentence
from scale_surgery.show.palette import LIGHT, PLACES, place_of
from scale_surgery.show.path_colours import (
    CLOSING,
    OPENING,
    BracketedPaths,
    ColouredPaths,
    Colouring,
    PathLegend,
    path_styles,
)
from scale_surgery.show.visible import visible_text

if TYPE_CHECKING:
    from scale_surgery.talking.records import Look

# a column of less than this is no text any more
LEAST_COLUMN = 20

# weight of the adapt path of a routed model, or that of each path of a composed one; None where nothing is known of it
Weight = float | Sequence[float] | None
# how the paths of tokens are shown
Marking = Literal["colours", "brackets", "nothing"]


def choose_marking(console: Console, look: Look) -> Marking:
    """How the paths of a routed model's tokens are shown.

    Args:
        console: Where.
        look: What was asked for.
    """
    has_colours = has_colour(console) and not look.is_plain
    if look.paths is False or (look.paths is None and not has_colours):
        return "nothing"
    return "colours" if has_colours else "brackets"


def has_colour(console: Console) -> bool:
    """Whether a console shows colours: not into a file, and not with NO_COLOR."""
    return console.color_system is not None and not console.no_color


def styles_of(console: Console) -> list[str]:
    """Styles of all places of the scale; a terminal of few colours gets three."""
    if console.color_system in ("standard", "windows"):
        third = PLACES // 3
        return (
            ["black on bright_blue"] * third + ["black on white"] * third + ["black on yellow"] * (PLACES - 2 * third)
        )
    return [f"{LIGHT.text} on {colour}" for colour in LIGHT.scale()]


class Legend:
    """What the colours mean, or the brackets where there are no colours."""

    def __init__(self, *, is_plain: bool = False, colouring: Colouring | None = None) -> None:
        """Say what marks mean.

        Args:
            is_plain: Whether colours are not wanted.
            colouring: Colours of the paths of a composed model; by default there are the two of a routed one.
        """
        self.is_plain, self.colouring = is_plain, colouring

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        if self.colouring is not None:
            yield PathLegend(self.colouring, is_plain=self.is_plain or not has_colour(console))
            return
        if self.is_plain or not has_colour(console):
            yield Text(
                f"in {OPENING}{CLOSING}: mostly from the adapt path; the rest from the preserve path", style="dim"
            )
            return
        scale = (Text("  ", style=style) for style in styles_of(console))
        yield Text("preserve path ") + Text().join(scale) + Text(" adapt path")


def render_opening(
    name: str, rows: Sequence[tuple[str, str]], marking: Marking, colouring: Colouring | None = None
) -> RenderableType:
    """Who answers and how, above a conversation, and what the marks mean."""
    legend = [] if marking == "nothing" else [Legend(is_plain=marking == "brackets", colouring=colouring)]
    return Group(Facts(name, rows), *legend, Text())


class Marks(Protocol):
    """Makes visible where tokens came from, one after the other."""

    def mark(self, text: str, weight: Weight) -> Text:
        """Show the next token, given what is known of the path that it came from."""

    def end(self) -> Text:
        """Show that no token follows."""


class Unmarked:
    """Shows tokens as text alone."""

    def mark(self, text: str, weight: Weight) -> Text:
        """The token."""
        return Text(visible_text(text))

    def end(self) -> Text:
        """Nothing."""
        return Text()


class Coloured:
    """Colours the background of tokens from the preserve path to the adapt path."""

    def __init__(self, styles: Sequence[str]) -> None:
        self.styles = styles

    def mark(self, text: str, weight: Weight) -> Text:
        """The token in its colour; a line break has none, which a terminal would draw to the end of the line."""
        style = self.styles[place_of(weight)] if isinstance(weight, float) else ""
        return Text("\n").join(Text(line, style=style) for line in visible_text(text).split("\n"))

    def end(self) -> Text:
        """Nothing: each token ends its own colour."""
        return Text()


class Bracketed:
    """Puts brackets around tokens that come mostly from the adapt path."""

    def __init__(self) -> None:
        self.is_open = False

    def mark(self, text: str, weight: Weight) -> Text:
        """The token, behind what opens or closes."""
        if not text:
            return Text()
        is_adapt = isinstance(weight, float) and weight > 0.5
        closing = CLOSING if self.is_open and not is_adapt else ""
        space = " " * text.startswith(" ")
        opening = OPENING if is_adapt and not self.is_open else ""
        self.is_open = is_adapt
        return Text(closing + space + opening + visible_text(text.removeprefix(" ")))

    def end(self) -> Text:
        """What closes."""
        was_open, self.is_open = self.is_open, False
        return Text(CLOSING if was_open else "")


def make_marks(console: Console, marking: Marking, colouring: Colouring | None = None) -> Marks:
    """Make what shows the paths of one text's tokens: the two of a routed model, or those of a composed one."""
    if colouring is not None and marking != "nothing":
        is_plain = marking == "brackets"
        return BracketedPaths(colouring.names) if is_plain else ColouredPaths(colouring, path_styles(console))
    if marking == "colours":
        return Coloured(styles_of(console))
    return Bracketed() if marking == "brackets" else Unmarked()


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
