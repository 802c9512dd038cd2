"""Tables of matrices in a page, a row for each layer and a column for each role, each cell coloured by its number."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from scale_surgery.show.tables_report import GROUPS, NONE, format_share

if TYPE_CHECKING:
    from scale_surgery.evidence.report_records import Report, TensorChange

BLOCK = re.compile(r"w\d+")


@dataclass(frozen=True)
class Cell:
    """A number of a table, and how it is written; None where there is none."""

    layer: int | None
    role: str
    value: float | None
    text: str


def matrices(report: Report) -> dict[str, list[TensorChange]]:
    """Matrices of layers, those of a block together where one of them changed, by whether they started as zeros.

    Args:
        report: What was found.

    Returns:
        Matrices by title.
    """
    found: dict[str, list[TensorChange]] = {}
    for tensor in sorted(report.tensors, key=lambda tensor: tensor.block):
        if tensor.group in GROUPS and len(tensor.shape) > 1:
            name = tensor.block.upper() if BLOCK.fullmatch(tensor.block) else f"Copied {tensor.block}"
            start = "from zeros" if tensor.norms.start_norm == 0 else "from its start"
            found.setdefault(f"{name}, {start}", []).append(tensor)
    return {title: own for title, own in found.items() if any(tensor.is_trained for tensor in own)}


def render_matrices(tensors: Sequence[TensorChange]) -> tuple[str, str]:
    """Make two tables of one block: how much changed, and in how many directions.

    Args:
        tensors: Matrices that started alike, as zeros or not.

    Returns:
        What they show, and HTML.
    """
    if all(tensor.norms.start_norm == 0 for tensor in tensors):
        title, text = "Norm over that of W", "It started as zeros: all of it is what training wrote."
        shares = [tensor.norms.relative_norm for tensor in tensors]
    else:
        title, text = "Change over the norm at the start", "How far it moved from where the expansion put it."
        shares = [tensor.norms.relative_change for tensor in tensors]
    changes = [
        Cell(tensor.layer, tensor.role, share, format_share(share))
        for tensor, share in zip(tensors, shares, strict=True)
    ]
    ranks = [_rank_cell(tensor) for tensor in tensors]
    largest = max((share for share in shares if share is not None and math.isfinite(share)), default=0.0)
    tables = (
        heat_table(title, changes, largest),
        heat_table("Effective rank of the change, of the most that it can be", ranks, 1.0),
    )
    return text, '<div class="charts heat">\n{}\n{}\n</div>'.format(*tables)


def _rank_cell(tensor: TensorChange) -> Cell:
    if tensor.change_rank is None:
        return Cell(tensor.layer, tensor.role, None, NONE)
    text = f"{tensor.change_rank:.1f}/{tensor.full_rank}"
    return Cell(tensor.layer, tensor.role, tensor.change_rank / tensor.full_rank, text)


def heat_table(title: str, cells: Sequence[Cell], most: float) -> str:
    """Make a table of numbers, coloured by their share of `most`."""
    roles = list(dict.fromkeys(cell.role for cell in cells))
    found = {(cell.layer, cell.role): cell for cell in cells}
    rows = []
    for layer in dict.fromkeys(cell.layer for cell in cells):
        columns = "".join(_cell(found.get((layer, role)), most) for role in roles)
        rows.append(f"<tr><th scope=row>{layer}</th>{columns}</tr>")
    head = "".join(f"<th scope=col>{escape(role)}</th>" for role in roles)
    table = f"<table>\n<tr><th scope=col>layer</th>{head}</tr>\n" + "\n".join(rows) + "\n</table>"
    return f"<figure>\n<figcaption>{escape(title)}</figcaption>\n<div class=scroll>{table}</div>\n</figure>"


def _cell(cell: Cell | None, most: float) -> str:
    if cell is None or cell.value is None or not math.isfinite(cell.value):
        return f"<td class=none>{NONE if cell is None else escape(cell.text)}</td>"
    return f'<td style="--v:{100 * cell.value / most if most else 0:.0f}">{escape(cell.text)}</td>'
