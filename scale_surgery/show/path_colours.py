"""Marks for the paths of a routed model: a colour for each, or the name of the path without colours.

At most eight paths can be distinguished. Further expansions, those with the least weight, share the pattern "others".
A token has the colour of the path with at least half of the weight. Exception: without such a path it has no colour.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from scale_surgery.drawing.palette import FEW_COLOURS, LIGHT, OTHERS_COLOUR, PATH_COLOURS
from scale_surgery.visible import visible_line, visible_text

OPENING, CLOSING = "⟦", "⟧"
# least weight of the path to which a token is attributed
MOST_OF_IT = 0.5
# marks for the paths of tokens
Marking = Literal["colours", "brackets", "nothing"]


@dataclass(frozen=True)
class Colouring:
    """The names of all paths, the base's first, and their places in PATH_COLOURS.

    Paths without their own colour share the place after the last colour.
    """

    names: tuple[str, ...]
    places: tuple[int, ...]

    @property
    def others(self) -> int:
        """The place of paths without their own colour."""
        return len(PATH_COLOURS)

    def named_places(self) -> Iterator[tuple[int, str]]:
        """Yield each used place with the name of its path."""
        yield from ((place, name) for place, name in zip(self.places, self.names, strict=True) if place != self.others)
        shared = [name for name, place in zip(self.names, self.places, strict=True) if place == self.others]
        if shared:
            yield self.others, f"others ({', '.join(shared)})"

    def place_of(self, weights: Sequence[float] | None) -> int | None:
        """Return the place of the path of a token, or None if no path has half of the weight."""
        path = leading(weights)
        return None if path is None else self.places[path]


def leading(weights: Sequence[float] | None) -> int | None:
    """Return the path with at least half of the weight, or None if there is none, or if weights are unknown."""
    if weights is None:
        return None
    path = max(range(len(weights)), key=weights.__getitem__)
    return path if weights[path] >= MOST_OF_IT else None


def choose_colours(names: Sequence[str], shares: Sequence[float] | None = None) -> Colouring:
    """Assign a colour to each path.

    If there are too many expansions, those with the largest shares get a colour, or the first ones without shares.
    """
    expansions = list(range(1, len(names)))
    if shares is not None:
        expansions.sort(key=lambda path: -shares[path])
    seen = sorted(expansions[: len(PATH_COLOURS) - 1])
    places = {0: 0} | {path: place for place, path in enumerate(seen, start=1)}
    return Colouring(tuple(names), tuple(places.get(path, len(PATH_COLOURS)) for path in range(len(names))))


def has_colour(console: Console) -> bool:
    """Return True if a console shows colours: not into a file, and not with NO_COLOR."""
    return console.color_system is not None and not console.no_color


def path_styles(console: Console) -> list[str]:
    """Return the styles of all places on a console."""
    if console.color_system in ("standard", "windows"):
        return [*(f"black on {colour}" for colour in FEW_COLOURS), "black on white underline"]
    return [*(f"{LIGHT.text} on {colour}" for colour in PATH_COLOURS), f"{LIGHT.text} on {OTHERS_COLOUR} underline"]


class Legend:
    """A legend of the path colours, or of the brackets if there are no colours."""

    def __init__(self, colouring: Colouring, *, is_plain: bool = False) -> None:
        self.colouring, self.is_plain = colouring, is_plain
        self.has_many = len(colouring.names) > 2

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        if self.is_plain or not has_colour(console):
            yield Text(
                f"in {OPENING}name: {CLOSING}: tokens of that expansion, which has most of the weight. Other tokens: "
                f"{self.colouring.names[0]}" + ", or no path alone" * self.has_many,
                style="dim",
            )
            return
        styles = path_styles(console)
        chips = [
            Text.assemble(("  ", styles[place]), f" {visible_line(name)}")
            for place, name in self.colouring.named_places()
        ]
        none = [Text("no colour: no path has half the weight", style="dim")] if self.has_many else []
        yield Text("   ").join([*chips, *none])


class PathMarks:
    """A marker of the tokens of one text by their paths.

    With colours, each token has the background of its path. With brackets, the name of an expansion comes before its
    tokens, and no bracket spans a line break.
    """

    def __init__(self, console: Console, marking: Marking, colouring: Colouring | None) -> None:
        self.marking, self.colouring, self.styles = marking, colouring, path_styles(console)
        self.path = 0

    def mark(self, text: str, weights: Sequence[float] | None) -> Text:
        """Return the next token with its mark, given the weights of the paths."""
        if self.colouring is None or self.marking == "nothing" or not text:
            return Text(visible_text(text))
        if self.marking == "brackets":
            return self._in_brackets(text, self.colouring.names, weights)
        place = self.colouring.place_of(weights)
        style = "" if place is None else self.styles[place]
        # no colour on line breaks: a terminal would fill the rest of the line
        return Text("\n").join(Text(line, style=style) for line in visible_text(text).split("\n"))

    def _in_brackets(self, text: str, names: Sequence[str], weights: Sequence[float] | None) -> Text:
        shown, line_end = text.removesuffix("\n"), "\n" * text.endswith("\n")
        # an empty line does not open a bracket
        path = (leading(weights) or 0) if shown else self.path
        before = Text()
        if path != self.path:
            before = self.end() + Text(" " * shown.startswith(" "))
            before.append(f"{OPENING}{visible_line(names[path])}: " if path else "")
            shown, self.path = shown.removeprefix(" "), path
        token = before + Text(visible_text(shown))
        return token + self.end() + Text(line_end) if line_end else token

    def end(self) -> Text:
        """Return the closing bracket if one is open."""
        was, self.path = self.path, 0
        return Text(CLOSING if was else "")
