"""A route report as one HTML page that needs nothing else: tokens coloured by path, the numbers of each on hover.

The page itself is templates/route_report.html; here is what its gaps are filled with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery.show.pages.filling import fill, write
from scale_surgery.show.palette import DARK, LIGHT, PLACES, Palette, place_of
from scale_surgery.show.visible import visible, visible_line, visible_text
from scale_surgery.surgery.routers import describe

if TYPE_CHECKING:
    from scale_surgery.routing.records import FileRoute, RouteReport, TokenPaths, TokenRoute, Totals

# difference of log-probabilities, in nats, at which the scale of evidence ends
EVIDENCE = 4.0


@dataclass(frozen=True)
class Token:
    """A token of the page: the space before it, the classes that colour it, and what is shown."""

    space: str
    classes: str
    text: str


@dataclass(frozen=True)
class Document:
    """A document of the page: what it is called where that says more than its file, where it comes from, its lines."""

    name: str
    source: str
    lines: list[list[Token]]


@dataclass(frozen=True)
class File:
    """A file of the page: its row of the summary, with the width of a bar in per cent, and its documents."""

    name: str
    cells: list[str]
    bar: str
    share: str
    documents: list[Document]


def write_page(report: RouteReport, file: Path) -> None:
    """Write a report as a page, whole or not at all; an existing file is replaced.

    Raises:
        CheckpointError: If it cannot be written.
    """
    write(render_page(report), file)


def render_page(report: RouteReport) -> str:
    """Make the page.

    Args:
        report: What was found.

    Returns:
        HTML that refers to no other file.
    """
    return fill(
        "route_report.html",
        title=f"Which path gave each token: {report.model}",
        facts=f"Base {report.base} · router {describe(report.routing)}",
        light=_variables(LIGHT),
        dark=_variables(DARK),
        places=PLACES,
        evidence=f"{EVIDENCE:g}",
        files=list(map(_file, report.files)),
        notes=list(_notes(report)),
        data=_data(report),
    )


def page_colours(palette: Palette) -> dict[str, str]:
    """Colours of what is no token."""
    names = ("background", "text", "muted", "line", "surface", "adapt", "focus")
    return {name: getattr(palette, name) for name in names}


def _variables(palette: Palette) -> dict[str, str]:
    return page_colours(palette) | {f"c{place}": colour for place, colour in enumerate(palette.scale())}


def _file(file: FileRoute[TokenRoute, Totals]) -> File:
    totals = file.totals
    losses = (totals.base_nats_per_token, totals.adapt_nats_per_token, totals.routed_nats_per_token)
    return File(
        file.file,
        [f"{totals.documents:,}", f"{totals.tokens:,}", *(f"{loss:.4f}" for loss in losses)],
        f"{0.0 if math.isnan(totals.routed_share) else 100 * totals.routed_share:.1f}",
        f"{totals.routed_share:.1%}",
        [
            Document(one.place_in(file.file), one.source, list(lines_of(one.tokens, map(_token, one.tokens))))
            for one in file.documents
        ],
    )


def lines_of(tokens: Sequence[TokenRoute | TokenPaths], shown: Iterable[Token]) -> Iterator[list[Token]]:
    """Tokens of the page up to the end of each line of the document.

    Args:
        tokens: The tokens of the document.
        shown: The same as the page shows them.
    """
    line: list[Token] = []
    for token, own in zip(tokens, shown, strict=True):
        line.append(own)
        if token.text.endswith("\n"):
            yield line
            line = []
    if line:
        yield line


def _token(token: TokenRoute) -> Token:
    kinds = []
    if token.adapt_weight is None or token.base_log_probability is None or token.adapt_log_probability is None:
        kinds.append("n")
    else:
        gain = token.adapt_log_probability - token.base_log_probability
        kinds += [f"w{place_of(token.adapt_weight)}", f"e{place_of((gain / EVIDENCE + 1) / 2)}"]
        kinds += [] if token.is_counted else ["p"]
    return shown_token(token, kinds)


def shown_token(token: TokenRoute | TokenPaths, kinds: Sequence[str]) -> Token:
    """A token of the page, with the classes that colour it."""
    shown = visible(token.text, token.piece)
    classes = ["t", *kinds, *([] if token.text else ["x"])]
    return Token(" " * shown.startswith(" "), " ".join(classes), shown.removeprefix(" "))


def _paths(report: RouteReport) -> dict[str, str]:
    """Names of the paths that the card shows, and of their fields; what is the base model's is shown once."""
    base = {"base": "base_log_probability", "preserve side": "preserve_log_probability"}
    preserve, _ = report.routing.paths(("expansion",))
    known = base if preserve.expansion else {"preserve path (base)": "base_log_probability"}
    return {**known, "adapt path": "adapt_log_probability", "routed": "routed_log_probability"}


def _data(report: RouteReport) -> dict[str, Any]:
    """The numbers of the tokens, for the page's script."""
    paths = _paths(report)
    rows = []
    for record in report.records():
        logs = None if record["position"] == 0 else [record[field] for field in paths.values()]
        # the script shows both as they are, the text between quotes, with its line breaks
        names = [visible_text(record["text"]), visible_line(record["piece"])]
        rows.append([*names, record["id"], record["position"], logs, record["cosine"], record["adapt_weight"]])
    return {"tokens": rows, "paths": list(paths), "decides": report.routing.is_hard}


def _notes(report: RouteReport) -> Iterator[str]:
    yield (
        "Losses are in nats per token, over the tokens that count: all but the first of a document, and of a question "
        "its answer alone. Prompts are in italics. The routed share is the mean weight of the adapt path."
    )
    yield from reading_notes(report.sequence_length, report.step)


def reading_notes(sequence_length: int, step: int) -> Iterator[str]:
    """How texts were read, and how the page is read."""
    yield (
        f"Longer documents are read in windows of {sequence_length} tokens, {step} apart; each token is "
        "shown as the first window that holds it gives it."
    )
    yield "Hover over a token for its numbers, or move with Tab and the arrow keys; a click makes a link to it."
