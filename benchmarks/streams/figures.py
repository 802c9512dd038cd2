"""The figure of benchmarks/streams: what a model knows of each task, as more of them follow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.biography.figures import DOTS_PER_INCH, STYLE
from benchmarks.streams.report import Course

# read in grey and by colour-blind people too
COLOURS, NOT_YET = "cividis", "#f2f2f2"
ACROSS, PANEL = 4, 1.95


def draw_retention(courses: Sequence[Course], file: Path) -> None:
    """Draw a panel for each course: tasks from top to bottom, time from left to right."""
    down = math.ceil(len(courses) / ACROSS)
    with matplotlib.rc_context(STYLE | {"axes.grid": False, "font.size": 8, "axes.titlesize": 9}):
        figure = Figure(figsize=(ACROSS * PANEL + 1.2, down * (PANEL + 0.2) + 0.3), layout="constrained")
        grid = figure.subplots(down, ACROSS, sharex=True, sharey=True, squeeze=False)
        for axes, course in zip(grid.flat, courses, strict=False):
            image = _draw_course(axes, course)
        for axes in grid.flat[len(courses) :]:
            axes.set_visible(False)
        for axes in grid[:, 0]:
            axes.set_yticks(range(len(courses[0].kinds) + 1), ["known before", *_numbered(courses[0].kinds)])
        figure.colorbar(image, ax=grid, shrink=0.6, label="right answers, %", aspect=30)
        figure.supxlabel("tasks learned so far", fontsize=8, color="#333333")
        figure.savefig(file, dpi=DOTS_PER_INCH)


def _draw_course(axes: Axes, course: Course) -> matplotlib.image.AxesImage:
    count = len(course.kinds)
    shares = [
        [100 * course.share(after, about) if about <= after else math.nan for after in range(1, count + 1)]
        for about in range(count + 1)
    ]
    axes.set_facecolor(NOT_YET)
    image = axes.imshow(
        shares, cmap=COLOURS, vmin=0, vmax=100, aspect="auto", extent=(0.5, count + 0.5, count + 0.5, -0.5)
    )
    axes.set_title(course.name + (",\nrehearsed" if course.rehearses else ""), fontsize=9)
    axes.set_xticks([1, *range(2, count + 1, 2)] if count > 1 else [1])
    axes.tick_params(length=0, labelbottom=True)
    axes.axhline(0.5, color="white", linewidth=1.5)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return image


def _numbered(kinds: Sequence[str]) -> list[str]:
    return [f"{number} {kind}" for number, kind in enumerate(kinds, 1)]
