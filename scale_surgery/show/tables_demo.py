"""Tables of the demo: its steps, the fresh process, and the known people at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from scale_surgery.show.layout import Facts, sentence

if TYPE_CHECKING:
    from scale_surgery.demo import Demo, Reloaded
    from scale_surgery.running.loss import Measurement


def render_step(number: int, title: str, command: str | None) -> RenderableType:
    """Render the heading of a step of the demo, with the command to type."""
    # on one line, so that it can be copied
    shown = [Text(f"$ {command}", style="dim", no_wrap=True, overflow="ignore"), Text()] if command else []
    return Group(Text(), sentence(f"{number}. {title}", "bold cyan"), *shown)


def render_reloaded(reloaded: Reloaded) -> RenderableType:
    """Render the result of the fresh process."""
    rows = [
        ("class", reloaded.model_class),
        ("logits", "bit-equal to the base's" if reloaded.logits_bit_equal else "DIFFERENT from the base's"),
        ("trains", f"{reloaded.trainable:,} new parameters; {reloaded.frozen:,} are frozen"),
        ("asked", " ".join(reloaded.question.split())),
        ("answered", f"{reloaded.answer}  (right: {reloaded.expected})"),
    ]
    return Facts("loaded with trust_remote_code", rows)


def render_demo(result: Demo) -> RenderableType:
    """Render the result of the demo."""
    same = f"{result.files_identical} of {result.files_compared} files are identical, byte for byte"
    word = Text("All promises kept.", style="bold green") if result.passed else Text("FAILED.", style="bold red")
    left = sentence(f"Kept in {result.folder}/: every model of the demo, and its data", "dim")
    return Group(Text(same), word, left)


def render_lesson(result: Demo, new_people: int) -> RenderableType:
    """Render the end of the demo: accuracy on old and new people, and kept tensors, by training method."""
    # title of the row, name of the model in the evaluation, folder of the model
    rows = (
        ("base", "biographies (base)", "biographies"),
        ("preserve", "trained", "trained"),
        ("learn, without its router", "routed, routing disabled", "job/routed"),
        ("learn", "routed", "job/routed"),
        ("full fine-tuning", "fine-tuned", "fine-tuned"),
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for side in ("old people known", f"{new_people} new people known", "base bytes"):
        table.add_column(side, justify="right")
    scores = {score.name: score for score in result.lesson.scores}
    for title, name, folder in rows:
        known = [_accuracy(measured) for measured in (scores[name].old, scores[name].new)]
        table.add_row(title, *known, _kept(result.base_tensors_kept[folder], result.base_tensors))
    return table


def _accuracy(measured: Measurement | None) -> str:
    return "not asked" if measured is None or measured.accuracy is None else f"{measured.accuracy:.1%}"


def _kept(kept: int, tensors: int) -> str:
    """Describe how many of the base's tensors a model still has byte for byte."""
    if kept == tensors:
        return "all there"
    return f"{kept} of {tensors} tensors" if kept else "overwritten"
