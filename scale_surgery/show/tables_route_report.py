"""What a route report looks like in a terminal: tokens coloured by path, and a table of files; see `tables`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.text import Text

from scale_surgery.errors import counted
from scale_surgery.show.answers import Legend, has_colour, make_marks
from scale_surgery.show.layout import NamedRows, heading, sentence
from scale_surgery.show.path_colours import Colouring, choose_colours
from scale_surgery.show.visible import visible
from scale_surgery.surgery.routers import describe

if TYPE_CHECKING:
    from scale_surgery.routing.records import FileRoute, RouteReport, TokenPaths, TokenRoute

# tokens of a file that are shown; nobody reads more of them in a terminal
MOST_SHOWN = 1000


def render_route_report(report: RouteReport) -> RenderableType:
    """A route report: tokens of each file, and the totals of all; of a composed model with all of its paths."""
    colouring = choose_colours(report.paths, report.shares) if report.paths else None
    files = (part for file in report.files for part in _file(file, colouring))
    totals = _path_totals(report) if report.paths else _totals(report)
    heads = heading("routing", f"{describe(report.routing)}; losses in nats per token")
    return Group(Legend(colouring=colouring), *files, Text(), heads, totals)


class Tokens:
    """Tokens of a document, coloured by path, or in brackets where there are no colours."""

    def __init__(
        self, where: str, tokens: Sequence[TokenRoute | TokenPaths], colouring: Colouring | None = None
    ) -> None:
        self.where, self.tokens, self.colouring = where, tokens, colouring

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        text = sentence(f"{self.where}  " if self.where else "", "dim")
        line = Text(overflow="fold") + text
        marks = make_marks(console, "colours" if has_colour(console) else "brackets", self.colouring)
        for token in self.tokens:
            part = marks.mark(_shown(token), token.weight)
            line.append_text(Text(part.plain, style="dim") if token.weight is None else part)
        line.append_text(marks.end())
        line.rstrip()
        yield line


def _shown(token: TokenRoute | TokenPaths) -> str:
    """A token, and the line break after it."""
    return visible(token.text, token.piece) + "\n" * token.text.endswith("\n")


def _file(file: FileRoute[Any, Any], colouring: Colouring | None = None) -> Iterator[RenderableType]:
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
    """Losses and routed share of each file."""
    table = NamedRows(["tokens", "base", "adapt", "routed", "routed share"])
    for file in report.files:
        own = file.totals
        losses = (own.base_nats_per_token, own.adapt_nats_per_token, own.routed_nats_per_token)
        table.add_row(file.file, f"{own.tokens:,}", *(f"{loss:.4f}" for loss in losses), f"{own.routed_share:.1%}")
    return table


def _path_totals(report: RouteReport) -> NamedRows:
    """Loss and share of each path in each file."""
    table = NamedRows(["tokens", "loss alone", "share"])
    for file in report.files:
        own = file.totals
        table.add_row(file.file, f"{own.tokens:,}", "", "")
        for name, loss, share in zip(report.paths, own.nats_per_token, own.shares, strict=True):
            table.add_row(f"  {name}", "", f"{loss:.4f}", f"{share:.1%}")
        table.add_row("  mixed", "", f"{own.mixed_nats_per_token:.4f}", "")
    return table
