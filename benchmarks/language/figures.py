"""Figures of benchmarks/language: what was learned against what was forgotten, and both on the way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.biography.figures import (
    BLACK,
    BLUE,
    BROWN,
    DOTS_PER_INCH,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    STYLE,
    VERMILION,
    Look,
)
from benchmarks.language.runs import Run, Scores, perplexity

SKY = "#56B4E9"
LOOKS = {
    "full": Look(BLACK),
    "full L2 0.01": Look(BLACK, "1"),
    "full L2 0.1": Look(BLACK, "2"),
    "full L2 1": Look(BLACK, "3"),
    "SSU": Look(GREY, "<"),
    "OSF": Look(GREY, ">"),
    "freeze": Look(GREY, "s"),
    "LoRA": Look(ORANGE, "D"),
    "LoRA MLP": Look(ORANGE, "d"),
    "CorDA": Look(VERMILION, "d"),
    "PiSSA": Look(VERMILION, "D"),
    "depth": Look(SKY, "P"),
    "grow-freeze": Look(BROWN, "v"),
    "preserve": Look(BLUE),
    "preserve whole": Look(BLUE, "p"),
    "preserve wide": Look(BLUE, "X"),
    "adapt attn": Look(GREEN, "^"),
    "adapt both": Look(PURPLE, "^"),
    "adapt both whole": Look(PURPLE, "p"),
    "adapt both wide": Look(PURPLE, "X"),
    "adapt both double": Look(PURPLE, "*"),
    "gated": Look(VERMILION, "^"),
    "gated double": Look(VERMILION, "*"),
}
# of the same colour as the smaller form
LINES = {"whole": "--", "wide": "-.", "double": ":"}
MARKER, REHEARSED_MARKER = 7, 9
Row = tuple[str, str, list[Scores], list[Run]]


def draw_plane(rows: Sequence[Row], file: Path) -> None:
    """Perplexity of the second language against that of the first; filled marks rehearse their own samples."""
    base = next(scores[0] for name, _, scores, _ in rows if name == "base")
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        axes.axvline(math.exp(base.old.nats), color=GREY, linewidth=1, linestyle=":")
        for name, rehearse, scores, group in rows:
            look = LOOKS.get(name.split(",")[0])
            if look is None or rehearse == "old" or name.endswith("cosine"):
                continue
            # with a router all weights of rehearsal lie at the base, and would hide the other marks
            if group[0].key.weight != 1 and name != group[0].key.method:
                continue
            old, new = perplexity(scores, "old"), perplexity(scores, "new")
            axes.plot(
                old,
                new,
                look.marker,
                color=look.colour,
                markerfacecolor="white" if rehearse == "none" else look.colour,
                markersize=REHEARSED_MARKER if "," in name else MARKER,
                markeredgewidth=2.2 if "," in name else 1.2,
            )
        axes.set(xlabel="perplexity, first language", ylabel="perplexity, second language")
        axes.set_title("Down: learned more. Left: forgot less. Dotted: the base. Filled: rehearses its own samples.")
        axes.set_xscale("log")
        axes.set_yscale("log")
        _plain_numbers(axes.xaxis)
        _plain_numbers(axes.yaxis)
        looks = _looks_of([group for *_, group in rows])
        axes.legend(handles=_legend(looks), frameon=False, fontsize=8, loc="upper right")
        figure.savefig(file, dpi=DOTS_PER_INCH)


def _plain_numbers(axis: Axis) -> None:
    """Write 60 and not 6 times ten."""
    for set_formatter in (axis.set_major_formatter, axis.set_minor_formatter):
        set_formatter("{x:g}")


def _looks_of(groups: Sequence[list[Run]]) -> dict[str, Look]:
    """Looks of the methods that were run."""
    methods = {run.key.method for group in groups for run in group}
    return {name: look for name, look in LOOKS.items() if name in methods}


def _legend(looks: Mapping[str, Look]) -> list[Line2D]:
    return [
        *(
            Line2D([], [], color=look.colour, marker=look.marker, linestyle="", markerfacecolor="white", label=name)
            for name, look in looks.items()
        ),
        Line2D(
            [],
            [],
            color=GREY,
            marker="o",
            linestyle="",
            markerfacecolor="white",
            markeredgewidth=2.2,
            markersize=9,
            label="the same with a router, part of the\nway to it, or intruders reduced",
        ),
    ]


def _line(method: str) -> str:
    """How the line of a method is drawn: that of a larger form is broken."""
    return LINES.get(method.split()[-1], "-")


def draw_curves(groups: Sequence[list[Run]], file: Path) -> None:
    """Perplexity of both languages over the tokens learned, without rehearsal and with the base's own samples."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 5.4), layout="constrained")
        grid = figure.subplots(2, 2, sharex=True, sharey="row", squeeze=False)
        for column, (rehearse, title) in enumerate((("none", "no rehearsal"), ("own", "rehearses its own samples"))):
            for row, (part, label) in enumerate((("old", "first language"), ("new", "second language"))):
                axes = grid[row][column]
                axes.set_yscale("log")
                _plain_numbers(axes.yaxis)
                for group in groups:
                    look = LOOKS.get(group[0].key.method)
                    if look is None or group[0].key.rehearse != rehearse or group[0].key.weight != 1:
                        continue
                    points = group[0].points
                    tokens = [point.tokens / 1e6 for point in points]
                    values = [math.exp(getattr(point, part)) for point in points]
                    axes.plot(tokens, values, _line(group[0].key.method), color=look.colour, linewidth=1.4)
                if column == 0:
                    axes.set_ylabel(f"perplexity, {label}")
                if row == 0:
                    axes.set_title(title)
                else:
                    axes.set_xlabel("million tokens learned")
        looks = _looks_of(groups).items()
        handles = [Line2D([], [], color=look.colour, linestyle=_line(name), label=name) for name, look in looks]
        figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
        figure.savefig(file, dpi=DOTS_PER_INCH)
