"""A route report as one HTML page that needs nothing else: tokens coloured by path, the numbers of all paths on hover.

The page itself is templates/route_report.html; here is what its gaps are filled with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from scale_surgery.drawing.palette import DARK, LIGHT, OTHERS_COLOUR, PATH_COLOURS, Palette
from scale_surgery.folder.routers import describe_router
from scale_surgery.show.pages.filling import fill, write
from scale_surgery.show.path_colours import Colouring, choose_colours
from scale_surgery.show.tables_route_report import new_token_notes
from scale_surgery.visible import visible, visible_line, visible_text

if TYPE_CHECKING:
    from scale_surgery.routing.records import FileRoute, RouteReport, TokenRoute

# nats by which a path has to be ahead of every other to be the one that predicted a token best
LEAD = 0.1
PATTERN = "repeating-linear-gradient(45deg, {} 0 3px, #e4e6ea 3px 6px)"


class PageToken(NamedTuple):
    """A token of the page: the space before it, the classes that colour it, and what is shown."""

    space: str
    classes: str
    text: str


class PathColour(NamedTuple):
    """A colour of the page: its number, its letter, and the name of its path."""

    number: int
    letter: str
    name: str


def write_page(report: RouteReport, file: Path) -> None:
    """Write a report as a page, whole or not at all; an existing file is replaced."""
    write(render_page(report), file)


def render_page(report: RouteReport) -> str:
    """The page of a report, which refers to no other file."""
    colouring = choose_colours(report.paths, report.shares)
    return fill(
        "route_report.html",
        title=f"Path of each token: {report.model}",
        facts=f"Base {report.base} · router {describe_router(report.routing, report.paths[1:])}",
        light=_variables(LIGHT),
        dark=_variables(DARK),
        places=[PathColour(place, _letter(place, colouring), name) for place, name in colouring.named_places()],
        lead=f"{LEAD:g}",
        files=[_file(file, colouring, report) for file in report.files],
        notes=list(_notes(report)),
        data=_data(report, colouring),
    )


def _variables(palette: Palette) -> dict[str, str]:
    """Colours of a page with the text colour on each; the base has that of the page."""
    base = (PATH_COLOURS[0], LIGHT.text) if palette is LIGHT else (palette.line, palette.text)
    others = (PATTERN.format(OTHERS_COLOUR), LIGHT.text)
    places = [base, *((colour, LIGHT.text) for colour in PATH_COLOURS[1:]), others]
    colours = palette._asdict()
    for place, (colour, text) in enumerate(places):
        colours |= {f"p{place}": colour, f"on{place}": text}
    return colours


def _letter(place: int, colouring: Colouring) -> str:
    """The letter where a path begins; the base has none."""
    return "+" if place == colouring.others else chr(ord("a") + place - 1) if place else ""


def _file(file: FileRoute, colouring: Colouring, report: RouteReport) -> dict[str, Any]:
    """A file of the page: its totals, those of each path with the width of a bar in per cent, and its documents."""
    totals = file.totals
    numbers = zip(colouring.names, colouring.places, totals.nats_per_token, totals.shares, strict=True)
    return {
        "name": file.file,
        "cells": [f"{totals.documents:,}", f"{totals.tokens:,}"],
        # where no path is the base
        "base": "" if report.weighs_base else f"{totals.base_nats_per_token:.4f}",
        "rows": [
            {
                "name": name,
                "place": place,
                "loss": f"{loss:.4f}",
                "bar": f"{0.0 if math.isnan(share) else 100 * share:.1f}",
                "share": f"{share:.1%}",
            }
            for name, place, loss, share in numbers
        ],
        "routed": f"{totals.routed_nats_per_token:.4f}",
        "documents": [
            # its name is empty where it says no more than that of its file
            {
                "name": document.place_in(file.file),
                "source": document.source,
                "lines": list(_lines(document.tokens, colouring)),
            }
            for document in file.documents
        ],
    }


def _lines(tokens: Sequence[TokenRoute], colouring: Colouring) -> Iterator[list[PageToken]]:
    """Tokens of the page up to the end of each line of the document; where a path begins is marked."""
    line: list[PageToken] = []
    before: tuple[int | None, int | None] = (None, None)
    for token in tokens:
        now = colouring.place_of(token.weights), _best(token.log_probabilities, colouring)
        shown = visible(token.text, token.piece)
        classes = ["t", *_kinds(token, now, before), *([] if token.text else ["x"])]
        line.append(PageToken(" " * shown.startswith(" "), " ".join(classes), shown.removeprefix(" ")))
        before = now
        if token.text.endswith("\n"):
            yield line
            line = []
    if line:
        yield line


def _kinds(
    token: TokenRoute, now: tuple[int | None, int | None], before: tuple[int | None, int | None]
) -> Iterator[str]:
    """The classes that colour a token: by weight and by evidence, and whether its path begins there."""
    if token.weights is None:
        yield "n"
        return
    for place, last, colour, begins in zip(now, before, "we", "sf", strict=True):
        if place is not None:
            yield f"{colour}{place}"
            if place != last:
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
        numbers = [None if values is None else list(values.values()) for values in known]
        base = None if report.weighs_base else record["base_log_probability"]
        numbers += [record["routed_log_probability"], record["cosine"], base]
        rows.append([*names, record["id"], record["position"], *numbers])
    return {"tokens": rows, "paths": list(map(visible_line, colouring.names)), "places": list(colouring.places)}


def _notes(report: RouteReport) -> Iterator[str]:
    yield (
        "Losses are in nats per token, over the scored tokens: all but the first of a document, and only the answer "
        "of a question. Prompts are in italics. A share is the mean weight of a path. A small letter marks the first "
        "token of a path."
    )
    yield (
        f"Longer documents are read in windows of {report.sequence_length} tokens, {report.step} apart. Each token has "
        "the numbers of the first window that contains it."
    )
    yield from new_token_notes(report)
    yield "Hover over a token for its numbers, or move with Tab and the arrow keys. A click makes a link to it."
