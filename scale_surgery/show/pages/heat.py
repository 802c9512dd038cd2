"""Tables of matrices in a page, a row for each layer and a column for each role, each cell coloured by its number."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scale_surgery.show.tables_report import GROUPS, NONE, format_share

if TYPE_CHECKING:
    from scale_surgery.evidence.report_records import Report, TensorChange

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


def matrices(report: Report) -> dict[str, list[TensorChange]]:
    """Matrices of layers by block and by whether they started as zeros, where one of them changed."""
    by_title: dict[str, list[TensorChange]] = {}
    for tensor in sorted(report.tensors, key=lambda tensor: tensor.block):
        if tensor.group in GROUPS and len(tensor.shape) > 1:
            name = tensor.block.upper() if BLOCK.fullmatch(tensor.block) else f"Copied {tensor.block}"
            start = "from zeros" if tensor.norms.start_norm == 0 else "from its start"
            by_title.setdefault(f"{name}, {start}", []).append(tensor)
    return {title: group for title, group in by_title.items() if any(tensor.is_trained for tensor in group)}


def heat_tables(tensors: Sequence[TensorChange]) -> tuple[str, list[HeatTable]]:
    """Two tables of one block and what they show: how much changed, and in how many directions."""
    if all(tensor.norms.start_norm == 0 for tensor in tensors):
        title, text = "Norm over that of W", "It started as zeros: all of it is what training wrote."
        shares = [tensor.norms.relative_norm for tensor in tensors]
    else:
        title, text = "Change over the norm at the start", "How far it moved from where the expansion put it."
        shares = [tensor.norms.relative_change for tensor in tensors]
    largest = max((share for share in shares if share is not None and math.isfinite(share)), default=0.0)
    changes = [Cell(format_share(share), _shade(share, largest)) for share in shares]
    ranks = [_rank_cell(tensor) for tensor in tensors]
    return text, [
        _table(title, tensors, changes),
        _table("Effective rank of the change, of the most that it can be", tensors, ranks),
    ]


def _rank_cell(tensor: TensorChange) -> Cell:
    if tensor.change_rank is None:
        return Cell(NONE, None)
    return Cell(f"{tensor.change_rank:.1f}/{tensor.full_rank}", _shade(tensor.change_rank / tensor.full_rank, 1.0))


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
