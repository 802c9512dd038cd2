"""What an adopted model looks like in a terminal; see `tables`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import RenderableType

from scale_surgery.errors import name_some
from scale_surgery.show.commands import command
from scale_surgery.show.layout import NEXT
from scale_surgery.show.tables import facts, format_bytes

if TYPE_CHECKING:
    from scale_surgery.surgery.adopt import Adopted


def render_adopted(done: Adopted) -> RenderableType:
    """What `adopt` wrote."""
    steps = "" if done.steps is None else f", after {done.steps:,} steps"
    rows = [
        ("written", str(done.path)),
        ("base", done.base_name),
        ("its tensors", _compared(done)),
        ("new tensors", f"{done.trained_tensors} of {done.expansion_tensors} were trained{steps}"),
    ]
    rows += [("rounded", f"once, as train does: {_counted(done.rounded)}")] if done.rounded else []
    rows += [("config.json", text) for text in done.other_settings]
    rows += [("recorded", f"numbers of {name_some(done.read)}")] if done.read else []
    rows += [("not read", name_some(done.not_read))] if done.not_read else []
    rows += [("shards", f"{format_bytes(done.bytes_written)} written"), (NEXT, command("verify", done.path))]
    return facts("adopted", rows)


def _compared(done: Adopted) -> str:
    if not done.base_tensors:
        return "none was saved, so none could be compared"
    equal = f"{done.base_tensors} compared by sha256, all equal"
    if not done.widened:
        return equal
    return f"{done.base_tensors} compared, all the same numbers; saved in another dtype: {_counted(done.widened)}"


def _counted(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())
