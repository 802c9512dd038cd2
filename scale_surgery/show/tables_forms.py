"""Tables of other forms of a model: merged, extracted, applied, adopted. See `tables`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import RenderableType

from scale_surgery.checkpoint.folder import read_config
from scale_surgery.checkpoint.names import CONFIG_FILE
from scale_surgery.command_lines import command
from scale_surgery.errors import counted, name_some
from scale_surgery.folder.routers import describe_router
from scale_surgery.planning.plan import base_title
from scale_surgery.running.loading import auto_class_of, needs_own_code
from scale_surgery.show.commands import verify_command
from scale_surgery.show.layout import NEXT, Facts
from scale_surgery.show.tables import finished, format_bytes

if TYPE_CHECKING:
    from scale_surgery.running.drift import Drift
    from scale_surgery.surgery.adopt import Adopted
    from scale_surgery.surgery.apply import Applied
    from scale_surgery.surgery.compose import Composed
    from scale_surgery.surgery.extract import Extracted
    from scale_surgery.surgery.merge import Merged

WORDS = {
    "fused": "one matrix for each linear; remote code",
    "stock": "a plain checkpoint of the base's architecture; no remote code",
    "blocks": "the expanded model again, every shard checked by sha256",
}
# reasons why a merged model has more or fewer parameters than the original
REASONS = {
    "zeros": "zeros in larger matrices, outside the blocks",
    "head": "parameters of the head, a separate matrix in the fused form",
    "copy": "parameters of the head, stored in the base beside the embedding",
    "router": "parameters of the router's matrix",
    "strength": "parameters of the expansion, which strength 0 leaves out",
}


def render_merged(done: Merged) -> RenderableType:
    """Render the output of `merge`: a merged checkpoint, or one split into blocks again."""
    added = done.parameters - done.parameters_before
    change = f", {added:+,} compared with the input" if added else ""
    rows = [
        ("written", f"{done.path}  ({format_bytes(done.bytes_written)})"),
        ("form", WORDS[done.form]),
        ("base", done.base_name),
        ("parameters", f"{done.parameters:,}{change}"),
    ]
    rows += [("of them", f"{count:+,} {REASONS[reason]}") for reason, count in done.differences.items()]
    rows += [] if done.drift is None else _drift_rows(done.drift)
    rows += [("not copied", ", ".join(done.left_out))]
    return finished("split into blocks" if done.form == "blocks" else "merged", rows, done.warnings, _next(done))


def _next(done: Merged) -> str:
    if done.form != "stock":
        return verify_command(done.path)
    config, path = read_config(done.path / CONFIG_FILE), json.dumps(str(done.path), ensure_ascii=False)
    trust = ", trust_remote_code=True" if needs_own_code(config) else ""
    return f"{auto_class_of(config).__name__}.from_pretrained({path}{trust})"


def _drift_rows(drift: Drift) -> list[tuple[str, str]]:
    size = "none, bit-equal" if drift.is_bit_equal else f"{drift.drift:.3g} on logits up to {drift.largest_logit:.3g}"
    same = drift.generation_agreement
    greedy = "nothing was generated" if same is None else f"greedy continuation {same:.1%}"
    return [
        ("drift", f"{size} ({drift.dtype}, {drift.device}, {counted(drift.tokens, 'token')})"),
        ("of the largest", f"{drift.share:.2g}, at most {drift.tolerance:g} passes for rounding"),
        ("same next token", f"{drift.top1_agreement:.1%}; {greedy}"),
        ("KL divergence", f"{drift.kl_divergence:.2g} nats per token"),
    ]


def render_extracted(done: Extracted) -> RenderableType:
    """Render the output of `extract`."""
    named = done.base_name if done.base_revision else "MODEL"
    shards = sum(size for name, size in done.files.items() if name.endswith(".safetensors"))
    rows = [
        ("written", str(done.path)),
        ("expansion", f"{counted(done.tensors, 'tensor')}, {format_bytes(shards)}"),
        ("base", f"{base_title(done.base_name, done.base_revision)}, {format_bytes(done.base_bytes)} not included"),
        ("licences", ", ".join(done.licences)),
        ("left out", name_some(done.left_out)),
        (NEXT, command("apply", done.path, "--base", named, "-o", "EXPANDED")),
    ]
    return Facts("extracted", rows)


def render_composed(done: Composed) -> RenderableType:
    """Render the output of `compose`."""
    rows = [
        ("written", f"{done.path}  ({format_bytes(done.bytes_added)} beside the base)"),
        ("base", done.base_name),
        ("paths", f"{len(done.expansions) + 1}: the base, {', '.join(done.expansions)}"),
        ("router", "none" if done.routing is None else describe_router(done.routing, list(done.expansions))),
    ]
    if done.removed:
        rows.append(("removed", f"{', '.join(done.removed)}; all other files are unchanged, by sha256"))
    rows.append(("not copied", name_some(done.left_out)))
    return finished("composed", rows, done.warnings, verify_command(done.path))


def render_applied(done: Applied) -> RenderableType:
    """Render the output of `apply`."""
    files = (
        f"other than before: {name_some(done.other_files)}" if done.other_files else "as before, like the whole folder"
    )
    rows = [
        ("written", str(done.path)),
        ("base", base_title(done.base_name, done.base_revision)),
        ("its tensors", f"{done.base_tensors} compared by sha256, all equal"),
        ("its files", files),
        ("expansion", counted(done.expansion_tensors, "tensor")),
        ("shards", f"{format_bytes(done.bytes_written)} written"),
    ]
    if done.foreign_code:
        rows.append(("code", f"not from a release, read it before you trust it: {name_some(done.foreign_code)}"))
    rows += [("not copied", name_some(done.left_out)), (NEXT, verify_command(done.path))]
    return Facts("applied", rows)


def render_adopted(done: Adopted) -> RenderableType:
    """Render the output of `adopt`."""
    steps = "" if done.steps is None else f", after {counted(done.steps, 'step')}"
    rows = [
        ("written", str(done.path)),
        ("base", done.base_name),
        ("its tensors", _compared(done)),
        ("new tensors", f"{done.trained_tensors} of {done.expansion_tensors} were trained{steps}"),
    ]
    rows += [("rounded", f"once, as train does: {_counted(done.rounded)}")] if done.rounded else []
    rows += [("settings", text) for text in done.other_settings]
    rows += [("recorded", f"numbers of {name_some(done.read)}")] if done.read else []
    rows += [("not read", name_some(done.not_read)), ("shards", f"{format_bytes(done.bytes_written)} written")]
    rows += [("not copied", name_some(done.left_out))]
    return finished("adopted", rows, done.other_computation, verify_command(done.path))


def _compared(done: Adopted) -> str:
    if not done.base_tensors:
        return "none saved, none compared"
    equal = f"{done.base_tensors} compared by sha256, all equal"
    if not done.widened:
        return equal
    return f"{done.base_tensors} compared, all equal in value; saved in another dtype: {_counted(done.widened)}"


def _counted(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())
