"""How each kind of layer can be expanded, as rows of a table."""

from __future__ import annotations

from collections.abc import Mapping

from scale_surgery.planning.architecture import Architecture, Kind
from scale_surgery.planning.selection import format_layers


def treatment_rows(architecture: Architecture, added: Mapping[int, int] | None = None) -> list[tuple[str, str]]:
    """How each kind of layer is expanded, and why no more of it."""
    if architecture.is_uniform:
        return [("treatment", _kind(architecture.kinds[0]))]
    rows = []
    for number, kind in enumerate(architecture.kinds):
        chosen = [
            layer
            for layer, kind_number in enumerate(architecture.kind_of_layer)
            if kind_number == number and (added is None or layer in added)
        ]
        if chosen:
            counts = sorted({added[layer] for layer in chosen}) if added is not None else []
            title = f"layer{'s' * (len(chosen) > 1)} {format_layers(tuple(chosen))}"
            most = "at most " * (len(counts) > 1)
            added_text = f": {most}+{counts[-1]:,}{' each' * (len(chosen) > 1)}" if counts else ""
            rows.append((title, _kind(kind) + added_text))
    return rows


def _kind(kind: Kind) -> str:
    parts = []
    for block in kind.blocks:
        reason = f" ({block.reason})" if block.reason else ""
        parts.append(f"{block.name or block.group} {block.treatment}{reason}")
    return ", ".join(parts)
