"""What extracts, and models that another trainer saved, look like in a terminal; see `tables`."""

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
    from scale_surgery.surgery.apply import Applied
    from scale_surgery.surgery.extract import Extracted


def render_extracted(done: Extracted) -> RenderableType:
    """What `extract` wrote."""
    named = done.base_name if done.base_revision else "MODEL"
    shards = sum(size for name, size in done.files.items() if name.endswith(".safetensors"))
    rows = [
        ("written", str(done.path)),
        ("expansion", f"{done.tensors} tensors, {format_bytes(shards)}"),
        ("base", f"{_base(done.base_name, done.base_revision)}, {format_bytes(done.base_bytes)} that stay out"),
    ]
    rows += [("licences", ", ".join(done.licences))] if done.licences else []
    rows += [("left out", name_some(done.left_out))] if done.left_out else []
    rows.append((NEXT, command("apply", done.path, "--base", named, "-o", "EXPANDED")))
    return facts("extracted", rows)


def render_applied(done: Applied) -> RenderableType:
    """What `apply` wrote."""
    count = len(done.differing)
    equal = f"{done.base_tensors} compared by sha256, all equal"
    tensors = f"{count} of {done.base_tensors} differ: {name_some(done.differing)}" if count else equal
    files = f"other than before: {name_some(done.other_files)}" if done.other_files else "as before, so is the folder"
    rows = [
        ("written", str(done.path)),
        ("base", _base(done.base_name, done.base_revision)),
        ("its tensors", tensors),
        ("its files", files),
        ("expansion", f"{done.expansion_tensors} tensors"),
        ("shards", f"{format_bytes(done.bytes_written)} written"),
    ]
    if done.foreign_code:
        rows.append(("code", f"no release wrote it, read it before you trust it: {name_some(done.foreign_code)}"))
    rows += [("not taken along", name_some(done.left_out))] if done.left_out else []
    rows.append((NEXT, command("verify", done.path)))
    return facts("applied by force, no promise but recoverable" if count else "applied", rows)


def _base(name: str, revision: str | None) -> str:
    return f"{name} at {revision}" if revision else name


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
