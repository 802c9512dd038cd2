"""Tables of `learn`: the estimate, the stages, and the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from scale_surgery.command_lines import command
from scale_surgery.errors import counted
from scale_surgery.show.commands import running_command, verify_command
from scale_surgery.show.layout import NEXT, Facts, NamedRows, heading, render_step, sentence
from scale_surgery.show.log_lines import format_left
from scale_surgery.show.tables import (
    format_bytes,
    format_count,
    format_seconds,
    render_evaluation,
    render_expansion,
    render_routed,
    render_training,
    render_warnings,
)
from scale_surgery.show.tables_calibrate import render_calibration
from scale_surgery.show.tables_plan import render_plan
from scale_surgery.show.tables_rank_layers import render_ranking
from scale_surgery.show.tables_verify import render_verification

if TYPE_CHECKING:
    from pathlib import Path

    from scale_surgery.learning.estimate import Estimate, ToSample
    from scale_surgery.learning.hold_out import HeldOut
    from scale_surgery.learning.learned import Learned, Row, Side

COLUMNS = {"old": ("loss", "forgetting", "accuracy"), "new": ("loss", "learning", "accuracy")}
ABOUT = {
    "texts-new": "Hold out new text",
    "texts-old": "Hold out old text",
    "layers": "Choose layers with a pilot",
    "plan": "Plan",
    "expand": "Expand",
    "train": "Train the new blocks",
    "route": "Add a router",
    "calibrate": "Calibrate the router",
    "evaluate": "Measure",
    "verify": "Verify",
    "report": "Report the changes",
}


def render_estimate(estimate: Estimate) -> RenderableType:
    """Render the estimate of a job, before it starts."""
    stages = [(stage.name, ABOUT[stage.name] + " (done)" * stage.is_done) for stage in estimate.stages]
    about = "at least" if estimate.is_least else "about"
    rows = [
        ("memory", f"about {format_bytes(estimate.memory_bytes)}"),
        ("disk", f"about {format_bytes(estimate.disk_bytes)} at most, {format_bytes(estimate.free_bytes)} are free"),
        ("to read", f"{about} {format_count(estimate.tokens)} tokens"),
        *([] if estimate.to_sample is None else [("to sample", _format_samples(estimate.to_sample))]),
        ("learning rate", f"{estimate.learning_rate:g} at most"),
    ]
    notes = [sentence(f"note: {note}", "yellow") for note in estimate.notes]
    notes += [sentence(f"missing: {estimate.disk_problem}", "red")] if estimate.missing_bytes else []
    return Group(Facts("to do", stages), Text(), Facts("", rows), *notes)


def _format_samples(sampled: ToSample) -> str:
    """Describe the text that the base samples before training, and the time for it."""
    took = "time unknown before the first batch" if sampled.seconds is None else f"about {format_left(sampled.seconds)}"
    return f"about {format_count(sampled.tokens)} tokens from the base, at most {sampled.texts:,} texts; {took}"


def render_lines(estimate: Estimate) -> RenderableType:
    """Render the commands of all stages, to type by hand."""
    lines: list[RenderableType] = []
    for stage in estimate.stages:
        lines.append(Text(stage.line, no_wrap=True, overflow="ignore"))
        lines += [] if stage.remark is None else [sentence(f"note: {stage.remark}", "yellow")]
    return Group(heading("stages"), *lines)


def render_recipe(file: Path) -> RenderableType:
    """Render the path of a recipe, and the command that runs it."""
    return Facts("recipe", [("written", str(file)), (NEXT, command("learn", "--recipe", file))])


def render_stage(name: str, line: str, number: int) -> RenderableType:
    """Render the heading of a stage, with its command."""
    return render_step(number, ABOUT[name], line)


def render_result(name: str, result: Any) -> RenderableType | None:
    """Render the result of a stage as its command does.

    None if an earlier run did the stage, or if its result is a page.
    """
    if name in ("texts-new", "texts-old"):
        return render_held_out(result)
    renders: dict[str, Callable[[Any], RenderableType]] = {
        "layers": render_ranking,
        "plan": lambda made: render_plan(made, tensors=False),
        "expand": render_expansion,
        "train": render_training,
        "route": render_routed,
        "calibrate": render_calibration,
        "evaluate": render_evaluation,
        "verify": render_verification,
    }
    return renders[name](result) if result is not None and name in renders else None


def render_held_out(done: HeldOut) -> RenderableType:
    """Render the amounts of text that were set aside."""
    rows = [
        (part, f"{counted(count, 'document')}, {done.characters[part]:,} characters")
        for part, count in done.documents.items()
    ]
    return Facts("held out", [("written", str(done.path)), *rows])


def cells_of(side: str, learned: Learned) -> list[tuple[str, ...]]:
    """Return the rows of the table of forgetting ("old") or of learning ("new")."""
    return [(row.name, *_side(getattr(row, side))) for row in learned.rows]


def _side(side: Side | None) -> tuple[str, str, str]:
    if side is None:
        return "", "", ""
    accuracy = "" if side.accuracy is None else f"{side.accuracy:.1%}"
    return f"{side.loss:.4f}", "" if side.change is None else f"{side.change:+z.4f}", accuracy


def render_learned(learned: Learned) -> RenderableType:
    """Render the end of a job: losses, the result of the verification, and the next command."""
    parts: list[RenderableType] = []
    for side in ("old", "new"):
        parts += list(_render_side(side, learned.rows))
    word = Text("verified", style="bold green") if learned.verified else Text("NOT verified", style="bold red")
    rows = [
        ("result", str(learned.result)),
        ("added", f"{format_count(learned.parameters_added)} parameters, in layers {learned.layers}"),
        *([("router", learned.router)] if learned.router is not None else []),
        ("page", str(learned.page)),
        ("took", format_seconds(learned.seconds)),
    ]
    after = running_command("chat", learned.result) if learned.verified else verify_command(learned.result)
    return Group(*parts, word, Facts("", rows), *render_warnings(learned.warnings), Facts("", [(NEXT, after)]))


def _render_side(side: str, rows: Sequence[Row]) -> Iterator[RenderableType]:
    scored = [(row.name, getattr(row, side)) for row in rows if getattr(row, side) is not None]
    if not scored:
        return
    asked = any(measured.accuracy is not None for _, measured in scored)
    yield heading(f"{side} text", "nats per token")
    table = NamedRows(COLUMNS[side] if asked else COLUMNS[side][:2])
    for name, measured in scored:
        cells = _side(measured)
        table.add_row(name, *(cells if asked else cells[:2]))
    yield table
    yield Text()
