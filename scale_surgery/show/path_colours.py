"""The paths of a routed model made visible: a colour for each, and their names where there are no colours.

Eight paths can be told apart, no more: of more expansions, those with the least weight share a pattern, "others". A
token has the colour of the path with at least half of the weight, and none where no path has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from scale_surgery.show.palette import FEW_COLOURS, LIGHT, OTHERS_COLOUR, PATH_COLOURS
from scale_surgery.show.visible import visible_line, visible_text

OPENING, CLOSING = "⟦", "⟧"
# least weight of the path to which a token is attributed
MOST_OF_IT = 0.5
# how the paths of tokens are shown
Marking = Literal["colours", "brackets", "nothing"]


@dataclass(frozen=True)
class Colouring:
    """Names of all paths, the base's first, and their places in PATH_COLOURS; many may share the place after them."""

    names: tuple[str, ...]
    places: tuple[int, ...]

    @property
    def others(self) -> int:
        """The place of paths without a colour of their own."""
        return len(PATH_COLOURS)

    def named_places(self) -> Iterator[tuple[int, str]]:
        """Each used place with the name of its path."""
        yield from ((place, name) for place, name in zip(self.places, self.names, strict=True) if place != self.others)
        shared = [name for name, place in zip(self.names, self.places, strict=True) if place == self.others]
        if shared:
            yield self.others, f"others ({', '.join(shared)})"

    def place_of(self, weights: Sequence[float] | None) -> int | None:
        """The place of the path from which a token comes; None where no path has half of the weight."""
        path = leading(weights)
        return None if path is None else self.places[path]


def leading(weights: Sequence[float] | None) -> int | None:
    """The path with at least half of the weight; None where none has it, or weights are unknown."""
    if weights is None:
        return None
    path = max(range(len(weights)), key=weights.__getitem__)
    return path if weights[path] >= MOST_OF_IT else None


def choose_colours(names: Sequence[str], shares: Sequence[float] | None = None) -> Colouring:
    """Give each path a colour; of too many expansions those with the largest shares, or the first ones."""
    expansions = list(range(1, len(names)))
    if shares is not None:
        expansions.sort(key=lambda path: -shares[path])
    seen = sorted(expansions[: len(PATH_COLOURS) - 1])
    places = {0: 0} | {path: place for place, path in enumerate(seen, start=1)}
    return Colouring(tuple(names), tuple(places.get(path, len(PATH_COLOURS)) for path in range(len(names))))


def has_colour(console: Console) -> bool:
    """Whether a console shows colours: not into a file, and not with NO_COLOR."""
    return console.color_system is not None and not console.no_color


def path_styles(console: Console) -> list[str]:
    """Styles of all places on a console."""
    if console.color_system in ("standard", "windows"):
        return [*(f"black on {colour}" for colour in FEW_COLOURS), "black on white underline"]
    return [*(f"{LIGHT.text} on {colour}" for colour in PATH_COLOURS), f"{LIGHT.text} on {OTHERS_COLOUR} underline"]


class Legend:
    """What the colours of paths mean, or the brackets where there are no colours."""

    def __init__(self, colouring: Colouring, *, is_plain: bool = False) -> None:
        self.colouring, self.is_plain = colouring, is_plain
        self.has_many = len(colouring.names) > 2

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        if self.is_plain or not has_colour(console):
            yield Text(
                f"in {OPENING}name: {CLOSING}: from that expansion, which has most of the weight; the rest from "
                f"{self.colouring.names[0]}" + ", or from no path alone" * self.has_many,
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
    """Shows the tokens of one text, one after the other, with the paths that they came from.

    By colours each token has the background of its path. In brackets the name of an expansion stands before its tokens;
    no bracket goes over the end of a line.
    """

    def __init__(self, console: Console, marking: Marking, colouring: Colouring | None) -> None:
        self.marking, self.colouring, self.styles = marking, colouring, path_styles(console)
        self.path = 0

    def mark(self, text: str, weights: Sequence[float] | None) -> Text:
        """The next token, given the weights of the paths that it came from."""
        if self.colouring is None or self.marking == "nothing" or not text:
            return Text(visible_text(text))
        if self.marking == "brackets":
            return self._in_brackets(text, self.colouring.names, weights)
        place = self.colouring.place_of(weights)
        style = "" if place is None else self.styles[place]
        # a line break has no colour, which a terminal would draw to the end of the line
        return Text("\n").join(Text(line, style=style) for line in visible_text(text).split("\n"))

    def _in_brackets(self, text: str, names: Sequence[str], weights: Sequence[float] | None) -> Text:
        shown, line_end = text.removesuffix("\n"), "\n" * text.endswith("\n")
        # an empty line opens no bracket
        path = (leading(weights) or 0) if shown else self.path
        before = Text()
        if path != self.path:
            before = self.end() + Text(" " * shown.startswith(" "))
            before.append(f"{OPENING}{visible_line(names[path])}: " if path else "")
            shown, self.path = shown.removeprefix(" "), path
        token = before + Text(visible_text(shown))
        return token + self.end() + Text(line_end) if line_end else token

    def end(self) -> Text:
        """The closing bracket, if one is open."""
        was, self.path = self.path, 0
        return Text(CLOSING if was else "")
