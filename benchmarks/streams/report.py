"""Table and figures of benchmarks/streams, from its records.

    python -m benchmarks.streams.report [--records FILE] [--images docs/images]

*kept* is what a model answers of a task after the last one, as a share of what was answered right after it was learned,
by the expansion, adapter or model that learned it; a mean over the tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import click

from benchmarks.harness import Records
from benchmarks.streams.compare import RECORDS
from benchmarks.streams.methods import METHODS
from benchmarks.streams.runs import Run

# what the figure on the first page shows: name, and whether it rehearses
FEW = (("composed adapt", False), ("full fine-tuning", False), ("LoRA", False), ("full fine-tuning, 3e-4", True))


@dataclass(frozen=True)
class Course:
    """What answers after each task, over all seeds.

    Attributes:
        name: What it is called.
        answering: What it is called in records.
        rehearses: Whether a model rehearses what it writes.
        runs: One for each seed.
    """

    name: str
    answering: str
    rehearses: bool
    runs: tuple[Run, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of the tasks, in their order."""
        return self.runs[0].kinds

    def share(self, after: int, about: int) -> float:
        """Right answers after so many tasks, 1 for the first; about a task, or with 0 about what the base knows."""
        return fmean(run.rows[self.answering][after - 1][about] for run in self.runs)

    @property
    def ends(self) -> list[float]:
        """Right answers after the last task, about what the base knows and about each task."""
        return [self.share(len(self.kinds), about) for about in range(len(self.kinds) + 1)]

    @property
    def kept(self) -> float:
        """See the module."""
        return fmean(
            end / right if right else 1.0
            for run in self.runs
            for end, right in zip(run.rows[self.answering][-1][1:], run.learned, strict=True)
        )

    @property
    def learned(self) -> float:
        """Right answers about each task right after it was learned, a mean over tasks."""
        return fmean(right for run in self.runs for right in run.learned)


def courses(runs: Sequence[Run]) -> list[Course]:
    """All that was recorded, without rehearsal first."""
    longest = max((run.key.settings.tasks for run in runs), default=0)
    all_courses = []
    for rehearses in (False, True):
        for method in METHODS:
            method_runs = tuple(
                run
                for run in runs
                if (run.key.method, run.key.rehearses, run.key.settings.tasks) == (method.name, rehearses, longest)
            )
            all_courses += [
                Course(shown, name, rehearses, method_runs) for name, shown in method.shown.items() if method_runs
            ]
    return all_courses


def summary(all_courses: Sequence[Course]) -> Iterator[str]:
    """The table of what is left at the end, in Markdown."""
    yield "| method | rehearsal | trained | learned | kept | tasks at the end | lowest | known before | seeds |"
    yield "|---|---|--:|--:|--:|--:|--:|--:|--:|"
    for course in all_courses:
        base, *tasks = course.ends
        shares = (course.learned, course.kept, fmean(tasks), min(tasks), base)
        cells = (
            course.name,
            "own samples" if course.rehearses else "none",
            f"{course.runs[0].parameters:,}",
            *(f"{share:.1%}" for share in shares),
            str(len(course.runs)),
        )
        yield f"| {' | '.join(cells)} |"


@click.command()
@click.option("--records", type=click.Path(path_type=Path, exists=True, dir_okay=False), default=RECORDS)
@click.option("--images", type=click.Path(path_type=Path, file_okay=False), help="Folder to draw into.")
def main(records: Path, images: Path | None) -> None:
    """Print the table, and draw."""
    all_courses = courses(Records(records, Run).read())
    click.echo("\n".join(summary(all_courses)))
    if images is not None:
        from benchmarks.streams.figures import draw_retention  # matplotlib is needed for figures alone

        draw_retention(all_courses, images / "streams.png")
        few = [course for course in all_courses if (course.name, course.rehearses) in FEW]
        draw_retention(few, images / "streams-few.png")


if __name__ == "__main__":
    main()
