"""What a route report looks like in a terminal: tokens coloured by path, and a table of files; see `tables`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.text import Text

from scale_surgery.show.palette import LIGHT, PLACES, place_of
from scale_surgery.show.tables import plain_table
from scale_surgery.show.visible import visible

if TYPE_CHECKING:
    from scale_surgery.routing.records import FileRoute, RouteReport, TokenRoute

# tokens of a file that are shown; nobody reads more of them in a terminal
MOST_SHOWN = 1000
# what stands around tokens of the adapt path where there are no colours
OPENING, CLOSING = "⟦", "⟧"


def render_route_report(report: RouteReport) -> RenderableType:
    """A route report: tokens of each file, and the totals of all."""
    return Group(Legend(), *(part for file in report.files for part in _file(file)), Text(), _totals(report))


class Legend:
    """What the colours mean, or the brackets where there are no colours."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        if _is_plain(console):
            yield Text(
                f"in {OPENING}{CLOSING}: mostly from the adapt path; the rest from the preserve path", style="dim"
            )
            return
        scale = (Text("  ", style=style) for style in _styles(console))
        yield Text("preserve path ") + Text().join(scale) + Text(" adapt path")


class Tokens:
    """Tokens of a document, coloured by path, or in brackets where there are no colours."""

    def __init__(self, where: str, tokens: Sequence[TokenRoute]) -> None:
        self.where, self.tokens = where, tokens

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        text = Text(f"{self.where}  " if self.where else "", style="dim")
        line = Text(overflow="fold") + text
        parts = _bracketed(self.tokens) if _is_plain(console) else _coloured(self.tokens, _styles(console))
        for part in parts:
            line.append_text(part)
        line.rstrip()
        yield line


def _is_plain(console: Console) -> bool:
    return console.color_system is None or console.no_color


def _styles(console: Console) -> list[str]:
    """Styles of all places of the scale; a terminal of few colours gets three."""
    if console.color_system in ("standard", "windows"):
        third = PLACES // 3
        return (
            ["black on bright_blue"] * third + ["black on white"] * third + ["black on yellow"] * (PLACES - 2 * third)
        )
    return [f"{LIGHT.text} on {colour}" for colour in LIGHT.scale()]


def _coloured(tokens: Sequence[TokenRoute], styles: Sequence[str]) -> Iterator[Text]:
    for token in tokens:
        shown, end = _shown(token)
        style = "dim" if token.adapt_weight is None else styles[place_of(token.adapt_weight)]
        yield Text(shown, style=style) + Text(end, style="default")


def _bracketed(tokens: Sequence[TokenRoute]) -> Iterator[Text]:
    is_open = False
    for token in tokens:
        shown, end = _shown(token)
        is_adapt = token.adapt_weight is not None and token.adapt_weight > 0.5
        closing = CLOSING if is_open and not is_adapt else ""
        space = " " * shown.startswith(" ")
        opening = OPENING if is_adapt and not is_open else ""
        yield Text(f"{closing}{space}{opening}{shown.removeprefix(' ')}{end}")
        is_open = is_adapt
    yield Text(CLOSING if is_open else "")


def _shown(token: TokenRoute) -> tuple[str, str]:
    """A token, and the line break after it."""
    return visible(token.text, token.piece), "\n" * token.text.endswith("\n")


def _file(file: FileRoute) -> Iterator[RenderableType]:
    yield Text()
    yield Text(file.file, style="bold")
    left = MOST_SHOWN
    for document in file.documents:
        if left > 0:
            yield Tokens(document.place_in(file.file), document.tokens[:left])
        left -= len(document.tokens)
    if left < 0:
        yield Text(f"... {-left:,} more tokens; -o FILE.html or FILE.jsonl shows all", style="dim")


def _totals(report: RouteReport) -> RenderableType:
    # a table's own title would be wrapped at the table's width
    heading = Text("routing", style="bold") + Text(
        f"  ({report.routing.description}; losses in nats per token)", style="not bold"
    )
    table = plain_table()
    table.add_column("", overflow="fold")
    for name in ("tokens", "base", "adapt", "routed", "routed share"):
        table.add_column(name, justify="right", header_style="dim", no_wrap=True)
    for file in report.files:
        own = file.totals
        losses = (own.base_nats_per_token, own.adapt_nats_per_token, own.routed_nats_per_token)
        table.add_row(file.file, f"{own.tokens:,}", *(f"{loss:.4f}" for loss in losses), f"{own.routed_share:.1%}")
    return Group(heading, table)
