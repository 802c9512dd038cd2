"""A route report in a terminal: tokens coloured by path, and a table of files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.text import Text

from scale_surgery.errors import counted
from scale_surgery.folder.routers import describe_router
from scale_surgery.show.layout import NamedRows, heading, sentence
from scale_surgery.show.path_colours import Colouring, Legend, PathMarks, choose_colours, has_colour
from scale_surgery.visible import visible

if TYPE_CHECKING:
    from scale_surgery.routing.records import FileRoute, RouteReport, TokenRoute

# most tokens of a file that are shown in a terminal
MOST_SHOWN = 1000


def render_route_report(report: RouteReport) -> RenderableType:
    """Render a route report: tokens of each file, and the totals of all."""
    colouring = choose_colours(report.paths, report.shares)
    files = (part for file in report.files for part in _file(file, colouring))
    heads = heading("routing", f"{describe_router(report.routing, report.paths[1:])}; losses in nats per token")
    notes = [sentence(note, "dim") for note in new_token_notes(report)]
    return Group(Legend(colouring), *files, Text(), heads, _totals(report), *notes)


def new_token_notes(report: RouteReport) -> Iterator[str]:
    """Generate a note if the text has tokens that the base cannot predict."""
    if count := report.new_tokens:
        yield (
            f"The text has {counted(count, 'new token')}, which the base cannot predict, so its loss is not "
            "comparable. evaluate measures the base on its own tokens of the text."
        )


class Tokens:
    """The tokens of a document, coloured by path, or in brackets if there are no colours."""

    def __init__(self, where: str, tokens: Sequence[TokenRoute], colouring: Colouring) -> None:
        self.where, self.tokens, self.colouring = where, tokens, colouring

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        text = sentence(f"{self.where}  " if self.where else "", "dim")
        line = Text(overflow="fold") + text
        marks = PathMarks(console, "colours" if has_colour(console) else "brackets", self.colouring)
        for token in self.tokens:
            line_end = "\n" * token.text.endswith("\n")
            part = marks.mark(visible(token.text, token.piece) + line_end, token.weights)
            line.append_text(Text(part.plain, style="dim") if token.weights is None else part)
        line.append_text(marks.end())
        line.rstrip()
        yield line


def _file(file: FileRoute, colouring: Colouring) -> Iterator[RenderableType]:
    yield Text()
    yield sentence(file.file, "bold")
    left = MOST_SHOWN
    for document in file.documents:
        if left > 0:
            yield Tokens(document.place_in(file.file), document.tokens[:left], colouring)
        left -= len(document.tokens)
    if left < 0:
        yield Text(f"... {counted(-left, 'more token')}; -o FILE.html or FILE.jsonl shows all", style="dim")


def _totals(report: RouteReport) -> NamedRows:
    """Return the loss and the share of each path in each file."""
    table = NamedRows(["tokens", "loss alone", "share"])
    for file in report.files:
        totals = file.totals
        table.add_row(file.file, f"{totals.tokens:,}", "", "")
        if not report.weighs_base:
            table.add_row("  base", "", f"{totals.base_nats_per_token:.4f}", "")
        for name, loss, share in zip(report.paths, totals.nats_per_token, totals.shares, strict=True):
            table.add_row(f"  {name}", "", f"{loss:.4f}", f"{share:.1%}")
        table.add_row("  routed", "", f"{totals.routed_nats_per_token:.4f}", "")
    return table
