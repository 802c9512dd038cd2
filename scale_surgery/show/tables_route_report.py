"""What a route report looks like in a terminal: tokens coloured by path, and a table of files; see `tables`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.text import Text

from scale_surgery.show.answers import Legend, has_colour, make_marks
from scale_surgery.show.layout import NamedRows, heading, sentence
from scale_surgery.show.visible import visible

if TYPE_CHECKING:
    from scale_surgery.routing.records import FileRoute, RouteReport, TokenRoute

# tokens of a file that are shown; nobody reads more of them in a terminal
MOST_SHOWN = 1000


def render_route_report(report: RouteReport) -> RenderableType:
    """A route report: tokens of each file, and the totals of all."""
    return Group(Legend(), *(part for file in report.files for part in _file(file)), Text(), _totals(report))


class Tokens:
    """Tokens of a document, coloured by path, or in brackets where there are no colours."""

    def __init__(self, where: str, tokens: Sequence[TokenRoute]) -> None:
        self.where, self.tokens = where, tokens

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        text = sentence(f"{self.where}  " if self.where else "", "dim")
        line = Text(overflow="fold") + text
        marks = make_marks(console, "colours" if has_colour(console) else "brackets")
        for token in self.tokens:
            part = marks.mark(_shown(token), token.adapt_weight)
            line.append_text(Text(part.plain, style="dim") if token.adapt_weight is None else part)
        line.append_text(marks.end())
        line.rstrip()
        yield line


def _shown(token: TokenRoute) -> str:
    """A token, and the line break after it."""
    return visible(token.text, token.piece) + "\n" * token.text.endswith("\n")


def _file(file: FileRoute) -> Iterator[RenderableType]:
    yield Text()
    yield sentence(file.file, "bold")
    left = MOST_SHOWN
    for document in file.documents:
        if left > 0:
            yield Tokens(document.place_in(file.file), document.tokens[:left])
        left -= len(document.tokens)
    if left < 0:
        yield Text(f"... {-left:,} more tokens; -o FILE.html or FILE.jsonl shows all", style="dim")


def _totals(report: RouteReport) -> RenderableType:
    table = NamedRows(["tokens", "base", "adapt", "routed", "routed share"])
    for file in report.files:
        own = file.totals
        losses = (own.base_nats_per_token, own.adapt_nats_per_token, own.routed_nats_per_token)
        table.add_row(file.file, f"{own.tokens:,}", *(f"{loss:.4f}" for loss in losses), f"{own.routed_share:.1%}")
    return Group(heading("routing", f"{report.routing.description}; losses in nats per token"), table)
