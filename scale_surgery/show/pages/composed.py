"""The report of a composed folder as one HTML page that needs nothing else: expansions, paths, router, promises."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from scale_surgery.planning.selection import format_layers
from scale_surgery.show.pages.filling import fill, write
from scale_surgery.show.pages.report import Cells, Fact, Section, page_colours
from scale_surgery.show.tables import format_bytes
from scale_surgery.show.tables_verify import verdict

if TYPE_CHECKING:
    from scale_surgery.evidence.several import ExpansionsSummary


def write_composed_page(held: ExpansionsSummary, file: Path) -> None:
    """Write what a composed folder holds as a page, whole or not at all; an existing file is replaced.

    Raises:
        CheckpointError: If it cannot be written.
    """
    write(render_composed_page(held), file)


def render_composed_page(held: ExpansionsSummary) -> str:
    """Make the page.

    Args:
        held: What lies in the folder.

    Returns:
        HTML that refers to no other file.
    """
    return fill(
        "report.html",
        title=f"What lies in {held.name}",
        model=f"Base {held.base_name} · {held.routing.description}",
        **page_colours(),
        notes=(),
        facts=list(_facts(held)),
        sections=[one for one in (_expansions(held), _promises(held)) if one.has_content],
        columns=(),
        rows=(),
        terms=(),
    )


def _facts(held: ExpansionsSummary) -> Iterator[Fact]:
    own = held.expansions.values()
    yield Fact("paths", str(len(held.expansions) + 1), "the base and every expansion")
    yield Fact(
        "new parameters", f"{sum(each.parameters for each in own):,}", format_bytes(sum(each.bytes for each in own))
    )
    yield Fact("last verified", held.verified)


def _expansions(held: ExpansionsSummary) -> Section:
    rows = [
        (name, own.variant, format_layers(own.layers), f"{own.parameters:,}", f"{own.steps:,}")
        for name, own in held.expansions.items()
    ]
    cells = Cells(("expansion", "variant", "layers", "parameters", "steps of training"), rows)
    return Section(
        "Expansions", "In the order of the paths; each is the model that it is alone, bit for bit.", cells=cells
    )


def _promises(held: ExpansionsSummary) -> Section:
    rows = [(own.name, str(verdict(own, own.name in held.required)), own.evidence) for own in held.promises]
    if not rows:
        return Section("Promises", "", sentence="Never verified: scale-surgery verify finds out which promises hold.")
    cells = Cells(("promise", "result", "evidence"), rows, is_text=True)
    return Section("Promises", f"As the last verification found them: {held.verified}.", cells=cells)
