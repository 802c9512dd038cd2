"""How results are laid out: facts, tables, sentences. Names from files stay in their cell, and words stay whole."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from scale_surgery.show.visible import visible_line

# between two columns
GAP = 2
# the row with the command to type next, which is never broken: it is there to be copied
NEXT = "next"


def sentence(text: str, style: str = "") -> Text:
    """A line of its own, whatever names stand in it."""
    return Text(visible_line(text), style=style)


class Warned(Text):
    """A line that warns, in a result; -q leaves it out."""

    def __init__(self, text: str) -> None:
        super().__init__(visible_line(f"warning: {text}"), style="yellow")


def heading(title: str, note: str = "") -> Text:
    """What stands above a table, however narrow that is."""
    return sentence(title, "bold") + sentence(f"  ({note})" if note else "", "not bold")


class Facts:
    """Names and values, one pair a line; values wrap beside their name, between words."""

    def __init__(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        self.title, self.rows = title, [(visible_line(name), visible_line(value)) for name, value in rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield heading(self.title)
        indent = max((cell_len(name) for name, _ in self.rows), default=0) + GAP
        for name, value in self.rows:
            left = 10**6 if name == NEXT else max(1, options.max_width - indent)
            for place, line in enumerate(_lines(value, left)):
                shown = "" if place else name
                before = Text(shown + " " * (indent - cell_len(shown)), style="dim")
                yield _whole(before + Text(line, style="not dim"))


class PlainTable(Table):
    """A table without lines, whose heading is as wide as it likes."""

    def __init__(self, title: str | None = None, **options: Any) -> None:
        super().__init__(header_style="dim", box=None, pad_edge=False, **options)
        self.above = title

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        """Add a row; a cell is one paragraph."""
        super().add_row(*(visible_line(cell) if isinstance(cell, str) else cell for cell in cells), **options)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.above:
            yield heading(self.above)
        yield from super().__rich_console__(console, options)


class NamedRows:
    """A table of names and short values; names that leave no room for the values stand above them."""

    def __init__(self, headers: Sequence[str], *, name: str = "", left: Collection[int] = ()) -> None:
        """Begin a table.

        Args:
            headers: What stands above the values; nothing where all are empty.
            name: What stands above the names.
            left: Which values begin at the left, counted from 1; numbers end at the right.
        """
        self.headers, self.left = [visible_line(header) for header in (name, *headers)], {0, *left}
        self.rows: list[tuple[str, ...]] = []

    def add_row(self, *cells: str) -> None:
        """Add a name and its values."""
        self.rows.append(tuple(map(visible_line, cells)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = [max(map(cell_len, column)) for column in zip(self.headers, *self.rows, strict=True)]
        is_wide = sum(widths) + GAP * (len(widths) - 1) > options.max_width
        if is_wide:
            widths[0] = 0
        if any(self.headers):
            yield _whole(Text(self._line(self.headers, widths), style="dim"))
        for name, *values in self.rows:
            if is_wide:
                yield _whole(Text(name))
            yield _whole(Text(self._line(["" if is_wide else name, *values], widths)))

    def _line(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        def parts() -> Iterator[str]:
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True)):
                blank = " " * (width - cell_len(cell))
                yield cell + blank if place in self.left else blank + cell

        return (" " * GAP).join(parts()).rstrip()


def _lines(text: str, width: int) -> Iterator[str]:
    """Break a text between words; a word that is longer than a line stays whole."""
    line, *words = text.split(" ")
    for word in words:
        if cell_len(line) + 1 + cell_len(word) > width:
            yield line.rstrip()
            line = word
        else:
            line = f"{line} {word}"
    yield line


def _whole(line: Text) -> Text:
    line.rstrip()
    line.no_wrap, line.overflow = True, "ignore"
    return line
