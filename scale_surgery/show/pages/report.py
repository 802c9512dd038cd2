"""A report as one HTML page that needs nothing else: the numbers, and plots of them.

The page itself is templates/report.html; here is what its gaps are filled with.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scale_surgery.drawing.palette import DARK, LIGHT
from scale_surgery.evidence.rehearsed import rehearsed_texts
from scale_surgery.folder.routers import describe_router
from scale_surgery.planning.methods import METHODS
from scale_surgery.show.pages.charts import Chart, collaboration_charts, run_charts, stream_charts
from scale_surgery.show.pages.filling import fill, write
from scale_surgery.show.tables_report import (
    GROUPS,
    NONE,
    collaboration,
    describe_measured,
    describe_streams,
    format_norm,
    format_share,
    separations,
)

if TYPE_CHECKING:
    from scale_surgery.evidence.report_records import Report, Streams, TensorChange

COLUMNS = ("layer", "block", "role", "norm", "change", "relative", "of W")

BLOCK = re.compile(r"w\d+")


@dataclass(frozen=True)
class Cell:
    """A number of a matrix as text, and its shade in per cent; None without a number."""

    text: str
    shade: int | None


@dataclass(frozen=True)
class HeatTable:
    """A table of the page: what it shows, its roles, and for each layer a cell of each role."""

    title: str
    roles: Sequence[str]
    rows: Mapping[int | None, Sequence[Cell]]


@dataclass(frozen=True)
class Fact:
    """A number at the top of the page."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Cells:
    """A table of texts: its columns, and rows that begin with a name."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    is_text: bool = False


@dataclass(frozen=True)
class Section:
    """A part of the page; shown where it has charts, tables or a sentence."""

    title: str
    text: str
    charts: Sequence[Chart] = ()
    tables: Sequence[HeatTable] = ()
    sentence: str = ""
    cells: Cells | None = None
    is_wide: bool = False

    @property
    def has_content(self) -> bool:
        """True if there is anything to show."""
        return bool(self.charts or self.tables or self.sentence or self.cells)


def write_page(report: Report, file: Path) -> None:
    """Write a report as a page, whole or not at all; an existing file is replaced."""
    write(render_page(report), file)


def render_page(report: Report) -> str:
    """The page of a report, which refers to no other file."""
    title = f"Effect of training on {report.path.resolve().name}"
    return render_headed(report, title, report.notes, list(_facts(report)))


def _describe_model(report: Report) -> str:
    """The base of a model, and how it was made."""
    kind = report.method if report.variant == report.method else f"{report.method}, {report.variant}"
    kind += "" if report.routing is None else f" · router {describe_router(report.routing)}"
    return f"Base {report.base_name} · {kind}"


def render_headed(
    report: Report, title: str, notes: Sequence[str], facts: Sequence[Fact], sections: Sequence[Section] = ()
) -> str:
    """The page of a report with a heading of its own, and sections of that first."""
    return fill(
        "report.html",
        title=title,
        model=_describe_model(report),
        light=LIGHT._asdict(),
        dark=DARK._asdict(),
        notes=notes,
        facts=facts,
        sections=[section for section in (*sections, *_sections(report)) if section.has_content],
        columns=COLUMNS,
        rows=[(tensor.name, _row(tensor)) for tensor in report.tensors],
        terms=list(_terms(report)),
    )


def _facts(report: Report) -> Iterator[Fact]:
    names = {tensor.name for tensor in report.tensors}
    trained = {tensor.name for tensor in report.tensors if tensor.is_trained}
    yield Fact("tensors changed", f"{len(trained)} of {len(names)}", f"{report.parameters:,} parameters added")
    if report.runs:
        steps = sum(run.get("steps", 0) for run in report.runs)
        yield Fact("optimizer steps", f"{steps:,}", f"{len(report.runs)} runs" if len(report.runs) > 1 else "")
    if texts := rehearsed_texts(report.runs):
        yield Fact("rehearsed", "yes", f"on {texts}: its effect is measured, not proved")
    for name, norms in collaboration(report):
        word, share = "norm" if norms.start_norm == 0 else "change", norms.change_of_base
        yield Fact(
            f"{name}, {word}",
            format_norm(norms.change),
            "" if share is None else f"{format_share(share)} of W's norm",
        )
    if apart := separations(report):
        shares = list(map(format_share, apart.values()))
        note = f"{' and '.join(apart)}, mean over layers. Copies that differ add capacity"
        yield Fact("copies apart from their originals", " / ".join(shares), note)
    for name, text in describe_measured(report):
        value, _, rest = text.partition(" ")
        yield Fact(name, value, rest)
    if report.streams is not None:
        last = report.streams.layers[-1]
        value = "bit-equal" if report.streams.is_bit_equal else f"cosine {last.cosine:.4f}"
        yield Fact("base stream", value, f"{report.streams.source}, {report.streams.tokens:,} tokens")


def _sections(report: Report) -> Iterator[Section]:
    yield Section("The training run", "The log of the last run, over optimizer steps.", list(run_charts(report)))
    yield Section("W12, layer by layer", METHODS[report.method].about_w12, list(collaboration_charts(report)))
    if report.streams is not None:
        yield _stream_section(report.streams)
    for title, tensors in _matrices(report).items():
        text, table = _heat_table(tensors)
        yield Section(title, text, tables=[table])


def _matrices(report: Report) -> dict[str, list[TensorChange]]:
    """Matrices of layers by block and by whether they started as zeros, where one of them changed."""
    by_title: dict[str, list[TensorChange]] = {}
    for tensor in sorted(report.tensors, key=lambda tensor: tensor.block):
        if tensor.group in GROUPS and len(tensor.shape) > 1:
            name = tensor.block.upper() if BLOCK.fullmatch(tensor.block) else f"Copied {tensor.block}"
            start = "from zeros" if tensor.norms.start_norm == 0 else "from initial values"
            by_title.setdefault(f"{name}, {start}", []).append(tensor)
    return {title: group for title, group in by_title.items() if any(tensor.is_trained for tensor in group)}


def _heat_table(tensors: Sequence[TensorChange]) -> tuple[str, HeatTable]:
    """Return the table of the changes of one block, and its caption."""
    if all(tensor.norms.start_norm == 0 for tensor in tensors):
        title, text = "Norm over the norm of W", "The initial values are zeros, so this norm is that of the change."
        shares = [tensor.norms.relative_norm for tensor in tensors]
    else:
        title, text = "Change over the initial norm", "Norm of the change over the norm of the initial values."
        shares = [tensor.norms.relative_change for tensor in tensors]
    largest = max((share for share in shares if share is not None and math.isfinite(share)), default=0.0)
    changes = [Cell(format_share(share), _shade(share, largest)) for share in shares]
    return text, _table(title, tensors, changes)


def _shade(value: float | None, most: float) -> int | None:
    if value is None or not math.isfinite(value):
        return None
    return round(100 * value / most) if most else 0


def _table(title: str, tensors: Sequence[TensorChange], cells: Sequence[Cell]) -> HeatTable:
    """Order cells, one of each tensor; a layer that lacks a role has an empty one there."""
    placed = {(tensor.layer, tensor.role): cell for tensor, cell in zip(tensors, cells, strict=True)}
    roles = list(dict.fromkeys(tensor.role for tensor in tensors))
    layers = dict.fromkeys(tensor.layer for tensor in tensors)
    return HeatTable(
        title, roles, {layer: [placed.get((layer, role), Cell(NONE, None)) for role in roles] for layer in layers}
    )


def _stream_section(streams: Streams) -> Section:
    title = "The base stream, layer by layer"
    if streams.is_bit_equal:
        sentence = f"{describe_streams(streams).capitalize()}."
        return Section(title, "Comparison with the base model on probe text.", sentence=sentence)
    text = (
        f"Comparison with the base model on {streams.source} ({streams.tokens:,} tokens, {streams.dtype}). Cosine is "
        "the mean over tokens, drift the largest absolute difference. The last layer is read after the final norm."
    )
    return Section(title, text, list(stream_charts(streams)))


def _row(tensor: TensorChange) -> tuple[str, ...]:
    """A tensor's row in the table of all tensors, in the order of COLUMNS."""
    norms = tensor.norms
    return (
        "" if tensor.layer is None else str(tensor.layer),
        tensor.block,
        tensor.role,
        format_norm(norms.norm),
        format_norm(norms.change),
        format_share(norms.relative_change),
        format_share(norms.relative_norm),
    )


def _terms(report: Report) -> Iterator[str]:
    if about := METHODS[report.method].about_rows:
        yield f"{about}. Cosine and drift of a layer are measured after its copy."
    yield (
        "Norms are Frobenius norms. Relative: norm of the change since the expansion over the initial norm. Of W: norm "
        "over the norm of the base weight."
    )
