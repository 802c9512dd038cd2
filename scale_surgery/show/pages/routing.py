"""A route report as one HTML page that needs nothing else: tokens coloured by path, the numbers of all paths on hover.

The page itself is templates/route_report.html; here is what its gaps are filled with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery.show.pages.filling import fill, write
from scale_surgery.show.palette import DARK, LIGHT, OTHERS_COLOUR, PATH_COLOURS, Palette
from scale_surgery.show.path_colours import Colouring, choose_colours
from scale_surgery.show.visible import visible, visible_line, visible_text
from scale_surgery.surgery.routers import describe

if TYPE_CHECKING:
    from scale_surgery.routing.records import DocumentRoute, FileRoute, RouteReport, TokenRoute

# nats by which a path has to be ahead of every other to be the one that predicted a token best
LEAD = 0.1
PATTERN = "repeating-linear-gradient(45deg, {} 0 3px, #e4e6ea 3px 6px)"


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
class Place:
    """A colour of the page: its number, the letter that says the same without it, and who has it."""

    number: int
    letter: str
    name: str


@dataclass(frozen=True)
class Row:
    """A path in the summary of a file, with the width of a bar in per cent."""

    name: str
    place: int
    loss: str
    bar: str
    share: str


@dataclass(frozen=True)
class File:
    """A file of the page: its summary, with the base's loss where no path is the base, and its documents."""

    name: str
    cells: list[str]
    base: str
    rows: list[Row]
    routed: str
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
    colouring = choose_colours(report.paths, report.shares)
    return fill(
        "route_report.html",
        title=f"Which path gave each token: {report.model}",
        facts=f"Base {report.base} · router {describe(report.routing, report.paths[1:])}",
        light=_variables(LIGHT),
        dark=_variables(DARK),
        places=[Place(place, _letter(place, colouring), name) for place, name in colouring.named_places()],
        lead=f"{LEAD:g}",
        files=[_file(file, colouring, report) for file in report.files],
        notes=list(_notes(report)),
        data=_data(report, colouring),
    )


def _variables(palette: Palette) -> dict[str, str]:
    """Colours of a page, and what is written on each; the base's is that of the page itself."""
    base = (PATH_COLOURS[0], LIGHT.text) if palette is LIGHT else (palette.line, palette.text)
    others = (PATTERN.format(OTHERS_COLOUR), LIGHT.text)
    places = [base, *((colour, LIGHT.text) for colour in PATH_COLOURS[1:]), others]
    colours = palette._asdict()
    for place, (colour, text) in enumerate(places):
        colours |= {f"p{place}": colour, f"on{place}": text}
    return colours


def _letter(place: int, colouring: Colouring) -> str:
    """What says without colour where a path begins; the base has none."""
    return "+" if place == colouring.others else chr(ord("a") + place - 1) if place else ""


def _file(file: FileRoute, colouring: Colouring, report: RouteReport) -> File:
    totals = file.totals
    numbers = zip(colouring.names, colouring.places, totals.nats_per_token, totals.shares, strict=True)
    return File(
        file.file,
        [f"{totals.documents:,}", f"{totals.tokens:,}"],
        "" if report.weighs_base else f"{totals.base_nats_per_token:.4f}",
        [
            Row(name, place, f"{loss:.4f}", f"{0.0 if math.isnan(share) else 100 * share:.1f}", f"{share:.1%}")
            for name, place, loss, share in numbers
        ],
        f"{totals.routed_nats_per_token:.4f}",
        [
            Document(one.place_in(file.file), one.source, list(_lines_of(one.tokens, _shown(one, colouring))))
            for one in file.documents
        ],
    )


def _lines_of(tokens: Sequence[TokenRoute], shown: Iterable[Token]) -> Iterator[list[Token]]:
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


def _shown_token(token: TokenRoute, kinds: Sequence[str]) -> Token:
    """A token of the page, with the classes that colour it."""
    shown = visible(token.text, token.piece)
    classes = ["t", *kinds, *([] if token.text else ["x"])]
    return Token(" " * shown.startswith(" "), " ".join(classes), shown.removeprefix(" "))


def _shown(document: DocumentRoute, colouring: Colouring) -> Iterator[Token]:
    """Tokens of the page; where a path begins is marked."""
    before: tuple[int | None, int | None] = (None, None)
    for token in document.tokens:
        now = colouring.place_of(token.weights), _best(token.log_probabilities, colouring)
        yield _shown_token(token, list(_kinds(token, now, before)))
        before = now


def _kinds(
    token: TokenRoute, now: tuple[int | None, int | None], before: tuple[int | None, int | None]
) -> Iterator[str]:
    """The classes that colour a token: by weight and by evidence, and whether its path begins there."""
    if token.weights is None:
        yield "n"
        return
    for own, last, colour, begins in zip(now, before, "we", "sf", strict=True):
        if own is not None:
            yield f"{colour}{own}"
            if own != last:
                yield begins
    if not token.is_counted:
        yield "p"


def _best(logs: Sequence[float] | None, colouring: Colouring) -> int | None:
    """The place of the path that predicted a token best; None where none is ahead."""
    if logs is None or any(map(math.isnan, logs)):
        return None
    first, second = sorted(logs, reverse=True)[:2]
    return colouring.places[list(logs).index(first)] if first - second >= LEAD else None


def _data(report: RouteReport, colouring: Colouring) -> dict[str, Any]:
    """The numbers of the tokens, for the page's script."""
    rows = []
    for record in report.records():
        names = [visible_text(record["text"]), visible_line(record["piece"])]
        known = [record["log_probabilities"], record["weights"]]
        numbers = [None if own is None else list(own.values()) for own in known]
        base = None if report.weighs_base else record["base_log_probability"]
        numbers += [record["routed_log_probability"], record["cosine"], base]
        rows.append([*names, record["id"], record["position"], *numbers])
    return {"tokens": rows, "paths": list(map(visible_line, colouring.names)), "places": list(colouring.places)}


def _notes(report: RouteReport) -> Iterator[str]:
    yield (
        "Losses are in nats per token, over the tokens that count: all but the first of a document, and of a question "
        "its answer alone. Prompts are in italics. A share is the mean weight of a path. A small letter stands where "
        "the text of a path begins."
    )
    yield (
        f"Longer documents are read in windows of {report.sequence_length} tokens, {report.step} apart; each token is "
        "shown as the first window that holds it gives it."
    )
    yield "Hover over a token for its numbers, or move with Tab and the arrow keys; a click makes a link to it."
