"""What a merged checkpoint looks like in a terminal; see `tables`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rich.console import RenderableType

from scale_surgery.show.commands import command
from scale_surgery.show.layout import NEXT
from scale_surgery.show.tables import facts, format_bytes

if TYPE_CHECKING:
    from scale_surgery.running.drift import Drift
    from scale_surgery.surgery.merge import Merged

WORDS = {
    "fused": "one matrix for each linear; same remote code",
    "stock": "a plain checkpoint of the base's architecture; no remote code",
    "blocks": "the expanded model again, every shard checked by sha256",
}


def render_merged(done: Merged) -> RenderableType:
    """A merged checkpoint, or one that was taken apart again."""
    added = done.parameters - done.parameters_before
    change = f", {added:+,} against the model it was made from" if added else ""
    rows = [
        ("written", f"{done.path}  ({format_bytes(done.bytes_written)})"),
        ("form", WORDS[done.form]),
        ("base", done.base_name),
        ("parameters", f"{done.parameters:,}{change}"),
    ]
    rows += [] if done.drift is None else _drift_rows(done.drift)
    rows += [("not taken along", ", ".join(done.left_out))] if done.left_out else []
    rows.append((NEXT, _next(done)))
    return facts("taken apart" if done.form == "blocks" else "merged", rows)


def _next(done: Merged) -> str:
    if done.form == "stock":
        return f"AutoModelForCausalLM.from_pretrained({json.dumps(str(done.path), ensure_ascii=False)})"
    return command("verify", done.path)


def _drift_rows(drift: Drift) -> list[tuple[str, str]]:
    found = "none, bit-equal" if drift.is_bit_equal else f"{drift.drift:.3g} on logits up to {drift.largest_logit:.3g}"
    same = drift.generation_agreement
    greedy = "nothing was generated" if same is None else f"greedy continuation {same:.1%}"
    return [
        ("drift", f"{found} ({drift.dtype}, {drift.device}, {drift.tokens} tokens)"),
        ("of the largest", f"{drift.share:.2g}, at most {drift.tolerance:g} passes for rounding"),
        ("same next token", f"{drift.top1_agreement:.1%}; {greedy}"),
        ("KL divergence", f"{drift.kl_divergence:.2g} nats per token"),
    ]
