"""A report as one HTML page that needs nothing else: the numbers, and plots of them.

The page itself is report_page.html; here its gaps are filled, every text escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from scale_surgery.checkpoint.staging import write_text
from scale_surgery.errors import CheckpointError
from scale_surgery.planning.methods import METHODS
from scale_surgery.show.charts import Curve, render_chart
from scale_surgery.show.figures import PANELS, VERMILION, curve_of, running_mean
from scale_surgery.show.heat import matrices, render_matrices
from scale_surgery.show.palette import DARK, LIGHT, Palette
from scale_surgery.show.tables_report import (
    GROUPS,
    NONE,
    collaboration,
    describe_measured,
    describe_streams,
    format_norm,
    format_rank,
    format_share,
    separations,
)

if TYPE_CHECKING:
    from scale_surgery.evidence.report_records import Report, Streams, TensorChange

TEMPLATE = Path(__file__).with_suffix(".html")
GAP = re.compile("@@([A-Z]+)@@")
Section = tuple[str, str, str]
# colour and marker of a curve
Look = tuple[str, Literal["circle", "square"]]
# two colours that people with any colour vision tell apart, and five steps from one light to one dark: for layers
LINES = {
    "light": {"first": "#0072b2", "second": "#c04a00"},
    "dark": {"first": "#6cb8f0", "second": "#ffa25c"},
}
STEPS = {
    "light": ("#8cc0e8", "#4f97d2", "#2171b5", "#0d4d87", "#062a4f"),
    "dark": ("#2f6ea8", "#4b92d1", "#7ab5e8", "#afd6f7", "#eaf5ff"),
}
FIRST: Look = ("first", "circle")
SECOND: Look = ("second", "square")
LOOKS = {"attn": FIRST, "ffn": SECOND}


def write_page(report: Report, file: Path) -> None:
    """Write a report as a page, whole or not at all; an existing file is replaced.

    Raises:
        CheckpointError: If it cannot be written.
    """
    page = render_page(report)
    try:
        write_text(file, page)
    except OSError as error:
        # what was begun; where its folder is gone too there is none
        with suppress(OSError):
            file.with_name(f"{file.name}.tmp").unlink()
        raise CheckpointError(
            f"{file}: cannot be written ({error.strerror or error}). Choose another place."
        ) from error


def render_page(report: Report) -> str:
    """Make the page.

    Args:
        report: What was found.

    Returns:
        HTML that refers to no other file.
    """
    kind = report.method if report.variant == report.method else f"{report.method}, {report.variant}"
    kind += "" if report.routing is None else f" · router {report.routing.description}"
    gaps = {
        "TITLE": escape(f"What training did to {report.path.name}"),
        "MODEL": escape(f"Base {report.base_name} · {kind}"),
        "LIGHT": _variables(LIGHT, "light"),
        "DARK": _variables(DARK, "dark"),
        "NOTES": "\n".join(f"<p class=note>{escape(note)}</p>" for note in report.notes),
        "FACTS": "\n".join(_facts(report)),
        "SECTIONS": "\n".join(_section(*section) for section in _sections(report) if section[2]),
        "TERMS": "\n".join(f"<p>{escape(text)}</p>" for text in _terms(report)),
    }
    return GAP.sub(lambda found: gaps[found[1]], TEMPLATE.read_text(encoding="utf-8"))


def _variables(palette: Palette, mode: str) -> str:
    colours = {name: getattr(palette, name) for name in ("background", "text", "muted", "line")}
    colours |= LINES[mode] | {"heat": palette.stops[0]}
    colours |= {f"step{place}": colour for place, colour in enumerate(STEPS[mode])}
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())


def _facts(report: Report) -> Iterator[str]:
    names = {tensor.name for tensor in report.tensors}
    trained = {tensor.name for tensor in report.tensors if tensor.is_trained}
    yield _fact("tensors changed", f"{len(trained)} of {len(names)}", f"{report.parameters:,} parameters added")
    if report.runs:
        steps = sum(run.get("steps", 0) for run in report.runs)
        yield _fact("optimizer steps", f"{steps:,}", f"{len(report.runs)} runs" if len(report.runs) > 1 else "")
    for name, norms in collaboration(report):
        word = "norm" if norms.start_norm == 0 else "change"
        yield _fact(f"{name}, {word}", format_norm(norms.change), f"{format_share(norms.change_of_base)} of W's norm")
    if apart := separations(report):
        shares = list(map(format_share, apart.values()))
        note = f"{' and '.join(apart)}, mean over layers: copies that separate are capacity gained"
        yield _fact("copies apart from their originals", " / ".join(shares), note)
    for name, text in describe_measured(report):
        value, _, rest = text.partition(" ")
        yield _fact(name, value, rest)
    if report.streams is not None:
        last = report.streams.layers[-1]
        value = "bit-equal" if report.streams.is_bit_equal else f"cosine {last.cosine:.4f}"
        yield _fact("base stream", value, f"{report.streams.source}, {report.streams.tokens:,} tokens")


def _fact(name: str, value: str, note: str) -> str:
    small = f"<small>{escape(note)}</small>" if note else ""
    return f"<div><dt>{escape(name)}</dt><dd>{escape(value)}{small}</dd></div>"


def _section(title: str, text: str, content: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n<p class=muted>{escape(text)}</p>\n{content}\n</section>"


def _sections(report: Report) -> Iterator[Section]:
    """Title, text and content of each section; what there is nothing of is empty."""
    yield "The training run", "What the last run logged, over optimizer steps.", _charts(_run_charts(report))
    yield (
        "W12, layer by layer",
        METHODS[report.method].about_w12,
        _charts(_collaboration_charts(report) if report.state == "trained" else iter(())),
    )
    yield "The base stream, layer by layer", *_stream_section(report.streams)
    for title, tensors in matrices(report).items():
        yield title, *render_matrices(tensors)
    yield (
        "Spectrum of W21",
        "Singular values of W21 by role: dashed at the start, as the expansion wrote them, solid now. A few layers are "
        "shown, from the lowest to the highest.",
        _charts(_spectrum_charts(report)),
    )
    yield "Every tensor", "The same numbers as with --details; --json has all of them.", _all_tensors(report)


def _charts(charts: Iterator[str]) -> str:
    drawn = "\n".join(chart for chart in charts if chart)
    return f"<div class=charts>\n{drawn}\n</div>" if drawn else ""


def _run_charts(report: Report) -> Iterator[str]:
    titles = ("Training loss", "Forgetting and learning", "Questions answered")
    for title, (label, lines) in zip(titles, PANELS, strict=True):
        curves = []
        for key, name, colour in lines:
            steps, values = curve_of(report.log, key)
            points = list(zip(steps, running_mean(values), strict=True))
            curves.append(Curve(name, points, *(SECOND if colour == VERMILION else FIRST)))
        yield render_chart(title, curves, "step", label)


def _collaboration_charts(report: Report) -> Iterator[str]:
    # what started as zeros has the norm of its change
    titles = (
        ("Change", "Change over the norm of W")
        if not METHODS[report.method].starts_at_zero
        else ("Norm", "Norm over that of W")
    )
    labels = (titles[0].lower(), "share of W's norm")
    for title, label, name in zip(titles, labels, ("change", "change_of_base"), strict=True):
        curves = [_layer_curve(report, group, name) for group in GROUPS]
        groups = [curve.name for curve in curves if curve.points]
        yield render_chart(f"{title}, {' and '.join(groups)}", curves, "layer", label)


def _layer_curve(report: Report, group: str, name: str) -> Curve:
    """A number of W12 of one group over the layers that have one."""
    own = (layer for layer in report.layers if (layer.group, layer.block) == (group, "w12"))
    found = ((layer.layer, getattr(layer.norms, name)) for layer in own)
    return Curve(GROUPS[group], [point for point in found if point[1] is not None], *LOOKS[group])


def _stream_section(streams: Streams | None) -> tuple[str, str]:
    if streams is None:
        return "", ""
    if streams.is_bit_equal:
        return (
            "Compared with the base model's on probe text.",
            f"<p>{escape(describe_streams(streams)).capitalize()}.</p>",
        )
    text = (
        f"Against the base model's, on {streams.source} ({streams.tokens:,} tokens, {streams.dtype}). Cosine is the "
        "mean over tokens, drift the largest absolute difference. The last layer is read after the final norm."
    )
    # the embedding's base part is the base model's, whatever was trained
    after = [layer for layer in streams.layers if layer.layer >= 0]
    cosines = Curve("cosine", [(layer.layer, layer.cosine) for layer in after], *FIRST)
    drifts = Curve("drift", [(layer.layer, layer.drift) for layer in after], *FIRST)
    charts = (
        render_chart("Cosine with the base model's", [cosines], "after layer", "cosine", reaches=1),
        render_chart("Drift from the base model's", [drifts], "after layer", "largest difference"),
    )
    return text, _charts(iter(charts))


def _spectrum_charts(report: Report) -> Iterator[str]:
    with_spectrum = [tensor for tensor in report.tensors if tensor.spectrum is not None]
    for role in dict.fromkeys(tensor.role for tensor in with_spectrum):
        own = [tensor for tensor in with_spectrum if tensor.role == role]
        curves = [curve for place, tensor in enumerate(_some(own)) for curve in _spectrum_curves(tensor, place)]
        yield render_chart(role, curves, "rank", "singular value", is_log=True)


def _some(tensors: Sequence[TensorChange]) -> list[TensorChange]:
    """At most as many as there are steps of colour, evenly spaced, the first and the last among them."""
    most = len(STEPS["light"])
    if len(tensors) <= most:
        return list(tensors)
    return [tensors[round(place * (len(tensors) - 1) / (most - 1))] for place in range(most)]


def _spectrum_curves(tensor: TensorChange, place: int) -> Iterator[Curve]:
    spectrum = tensor.spectrum
    assert spectrum is not None
    name, colour = f"layer {tensor.layer}", f"step{place}"
    if tensor.is_trained:
        start = list(zip(spectrum.ranks, spectrum.start, strict=True))
        yield Curve(f"{name} at the start", start, colour, is_dashed=True, in_legend=False)
    yield Curve(name, list(zip(spectrum.ranks, spectrum.now, strict=True)), colour)


def _all_tensors(report: Report) -> str:
    names = ("layer", "block", "role", "norm", "change", "relative", "of W", "rank", "at start", "of change", "full")
    head = "".join(f"<th scope=col>{name}</th>" for name in names)
    rows = "\n".join(_row(tensor) for tensor in report.tensors)
    table = f"<table class=all>\n<tr>{head}</tr>\n{rows}\n</table>"
    return f"<details>\n<summary>{len(report.tensors)} rows</summary>\n<div class=scroll>{table}</div>\n</details>"


def _row(tensor: TensorChange) -> str:
    norms, is_matrix = tensor.norms, len(tensor.shape) > 1
    ranks = (format_rank(rank) for rank in (tensor.rank, tensor.start_rank, tensor.change_rank))
    cells = (
        "" if tensor.layer is None else str(tensor.layer),
        tensor.block,
        tensor.role,
        format_norm(norms.norm),
        format_norm(norms.change),
        format_share(norms.relative_change),
        format_share(norms.relative_norm),
        *ranks,
        str(tensor.full_rank) if is_matrix else NONE,
    )
    return f'<tr title="{escape(tensor.name)}">{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'


def _terms(report: Report) -> Iterator[str]:
    if about := METHODS[report.method].about_rows:
        yield f"{about}; cosine and drift after a layer are after its copy."
    yield (
        "Norms are Frobenius norms. Relative: norm of the change since the expansion over the norm at the start. Of W: "
        "norm over that of the base weight beside it."
    )
    yield (
        "The effective rank is exp of the entropy of the singular values divided by their sum (Roy and Vetterli 2007): "
        "1 where one direction has all the weight, the smaller side of the matrix where all have the same."
    )
