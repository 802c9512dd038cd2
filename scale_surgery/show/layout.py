"""Layout of results: facts, tables, lines of text. A name from a file cannot leave its cell."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType, RenderResult
from rich.segment import Segments
from rich.table import Column, Table
from rich.text import Text

from scale_surgery.visible import visible_line

# blanks between two columns
GAP = 2
# the row with the next command, kept on one line so that it can be copied
NEXT = "next"


def sentence(text: str, style: str = "") -> Text:
    """Return one line of text. Line breaks and control characters become signs."""
    return Text(visible_line(text), style=style)


class Warned(Text):
    """A line with a warning in a result. -q omits it."""

    def __init__(self, text: str) -> None:
        super().__init__(visible_line(f"warning: {text}"), style="yellow")


def heading(title: str, note: str = "") -> Text:
    """Return the heading of a table, which may be wider than the table."""
    return sentence(title, "bold") + sentence(f"  ({note})" if note else "", "not bold")


class Facts:
    """A list of names and values, one pair per line. Long values wrap, and empty ones are omitted."""

    def __init__(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        self.title = title
        self.rows = [(visible_line(name), visible_line(value)) for name, value in rows if value]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield heading(self.title)
        indent = max((cell_len(name) for name, _ in self.rows), default=0) + GAP
        for name, value in self.rows:
            least = max(map(cell_len, [value] if name == NEXT else value.split(" ")))
            row = Table.grid(Column(style="dim", width=indent), Column(min_width=least))
            row.add_row(Text(name), Text(value))
            yield row


class PlainTable(Table):
    """A table without lines. Its heading may be wider than its columns."""

    def __init__(self, title: str | None = None, **options: Any) -> None:
        super().__init__(header_style="dim", box=None, pad_edge=False, **options)
        self.above = title

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        """Add a row. Each cell is one paragraph."""
        super().add_row(*(sentence(cell) if isinstance(cell, str) else cell for cell in cells), **options)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.above:
            yield heading(self.above)
        yield from super().__rich_console__(console, options)


class NamedRows:
    """A table of names and short values. Long names get a line of their own above their values."""

    def __init__(self, headers: Sequence[str], *, name: str = "", left: Collection[int] = ()) -> None:
        places = range(len(headers) + 1)
        self.columns: list[JustifyMethod] = ["left" if place in {0, *left} else "right" for place in places]
        self.rows: list[tuple[str, ...]] = []
        self.has_header = any((name, *headers))
        if self.has_header:
            self.add_row(name, *headers)

    def add_row(self, *cells: str) -> None:
        """Add a name and its values."""
        self.rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = self._table(self.rows)
        if console.measure(table, options=options.update(width=10_000)).maximum <= options.max_width:
            yield table
            return
        values = self._table([("", *values) for _, *values in self.rows])
        lines = console.render_lines(values, options, pad=False, new_lines=True)
        for place, ((name, *_), line) in enumerate(zip(self.rows, lines, strict=True)):
            if place or not self.has_header:
                yield Text(visible_line(name), no_wrap=True, overflow="ignore")
            yield Segments(line)

    def _table(self, rows: Sequence[Sequence[str]]) -> PlainTable:
        table = PlainTable(show_header=False)
        for justify in self.columns:
            table.add_column(justify=justify, no_wrap=True)
        for place, cells in enumerate(rows):
            table.add_row(*cells, style="dim" if self.has_header and not place else "")
        return table


def render_step(number: int, title: str, command: str | None) -> RenderableType:
    """Render the heading of a step, with the command to type."""
    # on one line, so that it can be copied
    shown = [Text(f"$ {command}", style="dim", no_wrap=True, overflow="ignore"), Text()] if command else []
    return Group(Text(), sentence(f"{number}. {title}", "bold cyan"), *shown)
