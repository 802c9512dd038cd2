"""Tables of a report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from scale_surgery.errors import counted
from scale_surgery.evidence.rehearsed import rehearsed_text
from scale_surgery.evidence.report_records import Norms, TensorChange, add_norms
from scale_surgery.folder.routers import describe_router
from scale_surgery.planning.methods import METHODS
from scale_surgery.show.layout import Facts, PlainTable, heading, sentence
from scale_surgery.show.tables import format_count

if TYPE_CHECKING:
    from scale_surgery.evidence.report_records import Report, Streams

# a missing value
NONE = "–"
GROUPS = {"attn": "attention", "ffn": "FFN"}
NORM_COLUMNS = ("norm", "change", "relative", "of W")


def render_report(report: Report, *, details: bool = False) -> RenderableType:
    """Render a report: the facts, each block over all layers, each layer, and with `details` each tensor."""
    parts: list[RenderableType] = [_facts(report), Text(), _blocks(report), Text(), _layers(report)]
    parts += [Text(), _tensors(report)] if details else []
    parts += [sentence(f"note: {note}", "yellow") for note in report.notes]
    return Group(*parts)


def format_norm(value: float | None) -> str:
    """Format a norm with three digits; a dash if it is missing."""
    if value is None:
        return NONE
    return "0" if value == 0 else f"{value:.0f}" if value >= 1000 else f"{value:#.3g}".removesuffix(".")


def format_share(value: float | None) -> str:
    """Format a share in percent."""
    if value is None:
        return NONE
    return "0" if value == 0 else f"{value:.0%}" if value >= 10 else f"{value:.1%}"


def collaboration(report: Report) -> list[tuple[str, Norms]]:
    """Return the norms of W12 over all layers, for attention and FFN if they have W12."""
    by_group = ((f"W12 {name}", report.find("w12", group)) for group, name in GROUPS.items())
    return [(name, add_norms(tensor.norms for tensor in tensors)) for name, tensors in by_group if tensors]


def separations(report: Report) -> dict[str, float]:
    """Return the mean distance of copied layers from their originals, by role; empty if there are no copies."""
    by_role: dict[str, list[float]] = {}
    for tensor in report.tensors:
        if tensor.separation is not None:
            by_role.setdefault(tensor.role, []).append(tensor.separation)
    return {role: sum(values) / len(values) for role, values in by_role.items()}


def describe_streams(streams: Streams) -> str:
    """Describe the base stream in one line."""
    if streams.is_bit_equal:
        return "bit-equal to the base model's after every layer"
    last, worst = streams.layers[-1], max(streams.layers, key=lambda layer: (math.isnan(layer.drift), layer.drift))
    return f"cosine {last.cosine:.4f} at the end; largest drift {format_norm(worst.drift)}, after layer {worst.layer}"


def describe_measured(report: Report) -> Iterator[tuple[str, str]]:
    """Yield forgetting and learning from the last measurement of the last training run."""
    for side, change in (("old", "forgetting"), ("new", "learning")):
        if change in report.measured:
            loss = report.measured[f"{side}_nats_per_token"]
            yield change, f"{report.measured[change]:+z.4f} nats per token on {side} text, to {loss:.4f}"


def _run(run: Mapping[str, Any]) -> str:
    steps = counted(run["steps"], "step") if "steps" in run else "steps not known"
    text = rehearsed_text(run)
    rehearsed = f", rehearsed on {text}" if text else ""
    return f"{steps}, by another trainer" if "adopted" in run else f"{steps}{rehearsed}"


def _facts(report: Report) -> RenderableType:
    count = len({tensor.name for tensor in report.tensors})
    trained = len({tensor.name for tensor in report.tensors if tensor.is_trained})
    kind = report.variant if report.routing is None else f"{report.variant}, routed ({describe_router(report.routing)})"
    rows = [
        ("base", report.base_name),
        ("variant", kind),
        ("changed", f"{trained} of {count} expansion tensors ({format_count(report.parameters)} parameters in all)"),
    ]
    if report.runs:
        rows.append(("training", "; ".join(map(_run, report.runs))))
    for name, norms in collaboration(report):
        word, share = "norm" if norms.start_norm == 0 else "change", norms.change_of_base
        of_base = "" if share is None else f", {format_share(share)} of W's norm"
        rows.append((name, f"{word} {format_norm(norms.change)}{of_base}"))
    if apart := separations(report):
        shares = ", ".join(f"{role} {format_share(share)}" for role, share in apart.items())
        rows.append(("copies apart", f"{shares}, mean over layers"))
    rows += describe_measured(report)
    rows.append(("base stream", "no model was run" if report.streams is None else describe_streams(report.streams)))
    if report.streams is not None:
        rows.append(
            ("read", f"{report.streams.source}: {counted(report.streams.tokens, 'token')}, {report.streams.dtype}")
        )
    return Facts(report.path.resolve().name, rows)


def _table(first: Sequence[str], numbers: Sequence[str]) -> Table:
    table = PlainTable()
    for name in first:
        table.add_column(name, overflow="fold", min_width=len(name))
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _blocks(report: Report) -> RenderableType:
    """Render each block and role over all layers."""
    table = _table(("block", "role"), NORM_COLUMNS)
    for (block, role), tensors in _by_block(report.tensors).items():
        norms = add_norms(tensor.norms for tensor in tensors)
        table.add_row(block, role, *_norm_cells(norms))
    return Group(heading("blocks", "norms over all layers"), table)


def _by_block(tensors: Iterable[TensorChange]) -> dict[tuple[str, str], list[TensorChange]]:
    """Group the tensors by block and role, blocks of linears first, sorted by name."""
    groups: dict[tuple[str, str], list[TensorChange]] = {}
    # the stable sort keeps the roles in layer order
    for tensor in sorted(tensors, key=lambda tensor: (tensor.group not in GROUPS, tensor.block)):
        groups.setdefault((tensor.block, tensor.role), []).append(tensor)
    return groups


def _norm_cells(norms: Norms) -> tuple[str, str, str, str]:
    shares = (format_share(norms.relative_change), format_share(norms.relative_norm))
    return format_norm(norms.norm), format_norm(norms.change), *shares


def _layers(report: Report) -> RenderableType:
    """Render each layer.

    The columns are norms of blocks with initial zeros, relative changes of the others, and the base stream after the
    layer.
    """
    columns = _layer_columns(report.tensors)
    streams = {} if report.streams is None else {layer.layer: layer for layer in report.streams.layers}
    table = _table(("layer",), [*(name.replace(" ", "\n") for name in columns), *(["cosine", "drift"] * bool(streams))])
    for layer in sorted({layer.layer for layer in report.layers} | {place for place in streams if place >= 0}):
        cells = [_layer_cell(column.get(layer, ())) for column in columns.values()]
        if streams:
            after = streams[layer]
            cells += [f"{after.cosine:.4f}", "bit-equal" if after.is_bit_equal else format_norm(after.drift)]
        table.add_row(str(layer), *cells)
    above = heading("layers", "norm of tensors initialised to zeros, relative change of others")
    return Group(above, *_on_copies(report, "cosine and drift are after it" if streams else ""), table)


def _on_copies(report: Report, more: str = "") -> Iterator[Text]:
    """Yield an explanation of the rows if layers were duplicated."""
    if about := METHODS[report.method].about_rows:
        yield sentence(f"{about}{f'; {more}' if more else ''}.", "dim")


def _layer_columns(tensors: Iterable[TensorChange]) -> dict[str, dict[int, list[Norms]]]:
    """Return norms by column and layer.

    A column is a block of a group. Roles that alone are zero initially get their own column.
    """
    matrices = [tensor for tensor in tensors if tensor.group in GROUPS and "bias" not in tensor.block]
    started = {(tensor.group, tensor.block) for tensor in matrices if tensor.norms.start_norm != 0}
    columns: dict[str, dict[int, list[Norms]]] = {}
    for tensor in sorted(matrices, key=lambda tensor: (tensor.group, tensor.block, tensor.norms.start_norm == 0)):
        is_alone = tensor.norms.start_norm == 0 and (tensor.group, tensor.block) in started
        name = f"{tensor.block} {tensor.role if is_alone else tensor.group}"
        if tensor.layer is not None:
            columns.setdefault(name, {}).setdefault(tensor.layer, []).append(tensor.norms)
    return columns


def _layer_cell(parts: Sequence[Norms]) -> str:
    if not parts:
        return ""
    norms = add_norms(parts)
    return format_norm(norms.norm) if norms.start_norm == 0 else format_share(norms.relative_change)


def _tensors(report: Report) -> RenderableType:
    table = _table(("layer", "block", "role"), NORM_COLUMNS)
    for tensor in report.tensors:
        layer = "" if tensor.layer is None else str(tensor.layer)
        table.add_row(layer, tensor.block, tensor.role, *_norm_cells(tensor.norms))
    above = heading("tensors", "relative: change over norm at the start; of W: over the base weight's norm")
    return Group(above, *_on_copies(report), table)
