"""The page of a whole job: what was learned and forgotten, the promises, the stages, and below them the report."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from scale_surgery.learning.tables import COLUMNS, cells_of
from scale_surgery.show.pages.report import Cells, Fact, Section, render_headed
from scale_surgery.show.tables import format_count, format_seconds

if TYPE_CHECKING:
    from scale_surgery.evidence.report_records import Report
    from scale_surgery.learning.learned import Learned

SIDES = {
    "old": ("Forgetting", "Losses on old text. Forgetting is the loss minus the base's."),
    "new": ("Learning", "Losses on new text. Learning is the base's loss minus the model's."),
}


def render_learned_page(learned: Learned, report: Report) -> str:
    """The page of a job, which refers to no other file."""
    title = f"Learning and forgetting of {Path(learned.model).name}"
    notes = (*learned.warnings, *report.notes)
    return render_headed(report, title, notes, list(_facts(learned)), list(_sections(learned)))


def _facts(learned: Learned) -> Iterator[Fact]:
    last = learned.rows[-1]
    if last.new is not None and last.new.change is not None:
        yield Fact("learned", f"{last.new.change:+z.4f}", f"nats per token of new text, {last.name}")
    if last.old is not None and last.old.change is not None:
        yield Fact("forgotten", f"{last.old.change:+z.4f}", f"nats per token of old text, {last.name}")
    yield Fact("added", format_count(learned.parameters_added), f"parameters, in layers {learned.layers}")
    yield Fact("verified" if learned.verified else "NOT verified", "yes" if learned.verified else "no")
    yield Fact("took", format_seconds(learned.seconds))


def _sections(learned: Learned) -> Iterator[Section]:
    # a table for each, as in the terminal: both side by side are wider than a telephone
    for side, (title, text) in SIDES.items():
        if any(getattr(row, side) is not None for row in learned.rows):
            yield Section(
                title,
                f"{text} In nats per token, on files or parts of files that no stage trained or calibrated on.",
                cells=_cells(side, learned),
            )
    promises = [(name, *text.partition(": ")[::2]) for name, text in learned.promises.items()]
    yield Section(
        "Promises",
        "Results of verify for the last model.",
        cells=Cells(("promise", "result", "evidence"), promises, True),
    )
    stages = [(stage.name, format_seconds(stage.seconds), stage.line) for stage in learned.stages]
    yield Section(
        "Stages",
        "Each stage is a command. The same commands make the same models.",
        cells=Cells(("stage", "took", "command"), stages, True),
    )


def _cells(side: str, learned: Learned) -> Cells:
    """A table without empty columns, such as accuracies without questions."""
    head, rows = ("", *COLUMNS[side]), cells_of(side, learned)
    kept = [column for column in range(len(head)) if not column or any(row[column] for row in rows)]
    return Cells(tuple(head[column] for column in kept), [tuple(row[column] for column in kept) for row in rows])
