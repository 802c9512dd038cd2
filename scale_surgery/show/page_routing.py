"""A route report as one HTML page that needs nothing else: tokens coloured by path, the numbers of each on hover.

The page itself is route_page.html; here its gaps are filled, every text escaped.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery.checkpoint.staging import write_text
from scale_surgery.show.palette import DARK, LIGHT, PLACES, Palette, place_of
from scale_surgery.show.visible import visible

if TYPE_CHECKING:
    from scale_surgery.routing.records import DocumentRoute, FileRoute, RouteReport, TokenRoute

TEMPLATE = Path(__file__).with_suffix(".html")
GAP = re.compile("@@([A-Z]+)@@")
# difference of log-probabilities, in nats, at which the scale of evidence ends
EVIDENCE = 4.0
HEAD = """<thead>
<tr><th></th><th></th><th></th><th colspan=3 scope=colgroup>loss, nats per token</th><th></th></tr>
<tr><th></th><th scope=col>documents</th><th scope=col>tokens</th><th scope=col>base</th><th scope=col>adapt path</th>
<th scope=col>routed</th><th scope=col>routed share</th></tr>
</thead>"""


def write_page(report: RouteReport, file: Path) -> None:
    """Write a report as a page, whole or not at all; an existing file is replaced."""
    write_text(file, render_page(report))


def render_page(report: RouteReport) -> str:
    """Make the page.

    Args:
        report: What was found.

    Returns:
        HTML that refers to no other file.
    """
    scale = [f"var(--c{place})" for place in range(PLACES)]
    gaps = {
        "TITLE": escape(f"Which path gave each token: {report.model}"),
        "FACTS": escape(f"Base {report.base} · router {report.routing.description}"),
        "LIGHT": _variables(LIGHT),
        "DARK": _variables(DARK),
        "CLASSES": "\n".join(_rules()),
        "GRADIENT": ", ".join(scale),
        "EVIDENCE": f"{EVIDENCE:g}",
        "SUMMARY": _summary(report),
        "FILES": "\n".join(_file(number, file) for number, file in enumerate(report.files)),
        "NOTES": "\n".join(f"<p>{escape(note)}</p>" for note in _notes(report)),
        "DATA": _data(report),
    }
    return GAP.sub(lambda found: gaps[found[1]], TEMPLATE.read_text(encoding="utf-8"))


def _variables(palette: Palette) -> str:
    names = ("background", "text", "muted", "line", "surface", "adapt", "focus")
    colours = {name: getattr(palette, name) for name in names}
    colours |= {f"c{place}": colour for place, colour in enumerate(palette.scale())}
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())


def _rules() -> Iterator[str]:
    """Colours of tokens; those of the adapt path are underlined too, for eyes and printers without colour."""
    for place in range(PLACES):
        line = " box-shadow: inset 0 -2px var(--adapt);" if place > PLACES // 2 else ""
        yield f".by-weight .w{place}, .by-evidence .e{place} {{ background: var(--c{place});{line} }}"


def _summary(report: RouteReport) -> str:
    rows = "\n".join(_summary_row(number, file) for number, file in enumerate(report.files))
    return f"<table class=files>\n{HEAD}\n<tbody>\n{rows}\n</tbody>\n</table>"


def _summary_row(number: int, file: FileRoute) -> str:
    totals = file.totals
    losses = (totals.base_nats_per_token, totals.adapt_nats_per_token, totals.routed_nats_per_token)
    cells = [f"{totals.documents:,}", f"{totals.tokens:,}", *(f"{loss:.4f}" for loss in losses)]
    width = 0.0 if math.isnan(totals.routed_share) else 100 * totals.routed_share
    bar = f'<span class=bar><span style="width:{width:.1f}%"></span></span>'
    name = f'<td><a href="#f{number}">{escape(file.file)}</a></td>'
    share = f"<td class=share>{bar}{totals.routed_share:.1%}</td>"
    return f"<tr>{name}{''.join(f'<td>{cell}</td>' for cell in cells)}{share}</tr>"


def _file(number: int, file: FileRoute) -> str:
    documents = "\n".join(_document(file.file, document) for document in file.documents)
    return f'<section>\n<h2 id="f{number}">{escape(file.file)}</h2>\n{documents}\n</section>'


def _document(file: str, document: DocumentRoute) -> str:
    where = document.place_in(file)
    title, name = (f"<h3>{escape(where)}</h3>", "document named") if where else ("", "document")
    label = escape(f"Tokens of {document.source}; arrow keys move", quote=True)
    lines = "".join(f"<p>{line}</p>" for line in _lines(document))
    text = f'<div class=text dir=auto role=group aria-label="{label}">{lines}</div>'
    return f'<div class="{name}">{title}{text}</div>'


def _lines(document: DocumentRoute) -> Iterator[str]:
    """Tokens up to the end of each line of the document."""
    line: list[str] = []
    for token in document.tokens:
        line.append(_token(token))
        if token.text.endswith("\n"):
            yield "".join(line)
            line = []
    if line:
        yield "".join(line)


def _token(token: TokenRoute) -> str:
    shown = escape(visible(token.text, token.piece), quote=False)
    kinds = ["t"]
    if token.adapt_weight is None or token.base_log_probability is None or token.adapt_log_probability is None:
        kinds.append("n")
    else:
        gain = token.adapt_log_probability - token.base_log_probability
        kinds += [f"w{place_of(token.adapt_weight)}", f"e{place_of((gain / EVIDENCE + 1) / 2)}"]
        kinds += [] if token.is_counted else ["p"]
    kinds += [] if token.text else ["x"]
    # the space before a word is left white, or lines would end in coloured ones
    space = " " * shown.startswith(" ")
    return f'{space}<span class="{" ".join(kinds)}">{shown.removeprefix(" ")}</span>'


def _paths(report: RouteReport) -> dict[str, str]:
    """Names of the paths that the card shows, and of their fields; what is the base model's is shown once."""
    base = {"base": "base_log_probability", "preserve side": "preserve_log_probability"}
    known = {"preserve path (base)": "base_log_probability"} if report.routing.is_strict else base
    return {**known, "adapt path": "adapt_log_probability", "routed": "routed_log_probability"}


def _data(report: RouteReport) -> str:
    """The numbers, as JSON that no text in it can end."""
    paths = _paths(report)
    rows = []
    for record in report.records():
        logs = None if record["position"] == 0 else [record[field] for field in paths.values()]
        names = [record[key] for key in ("text", "piece", "id", "position")]
        rows.append([*names, logs, record["cosine"], record["adapt_weight"]])
    content: dict[str, Any] = {"tokens": rows, "paths": list(paths), "decides": report.routing.router == "cosine"}
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _notes(report: RouteReport) -> Iterator[str]:
    yield (
        "Losses are in nats per token, over the tokens that count: all but the first of a document, and of a question "
        "its answer alone. Prompts are in italics. The routed share is the mean weight of the adapt path."
    )
    yield (
        f"Longer documents are read in windows of {report.sequence_length} tokens, {report.step} apart; each token is "
        "shown as the first window that holds it gives it."
    )
    yield "Hover over a token for its numbers, or move with Tab and the arrow keys; a click makes a link to it."
