"""What it costs: the table and the figure of docs/results.md, from `costs.jsonl`.

    python -m benchmarks.costs [--images docs/images]

Each line of that file is a row of a record in this folder, with its numbers as they stand there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.records import read_lines

FILE = Path(__file__).with_suffix(".jsonl")
# panels of the figure, by what their rows are compared with
PANELS = {
    "LoRA": "a training step",
    "an ordinary model of that size": "expanded and fused models",
    "the same without a router": "routed models",
    "the base": "many expansions in one model",
}


@dataclass(frozen=True)
class Cost:
    """One row.

    Attributes:
        what: A model, or what is done.
        beside: What the numbers are multiples of; without it they have units.
        record: The record in which they stand.
        in_table: Whether the table has the row; the figure has all of its panels.
        measured: "time", "generation", "memory", as the record writes them.
    """

    what: str
    beside: str
    record: str
    in_table: bool
    measured: Mapping[str, str]


def read_costs() -> list[Cost]:
    """Read all rows."""
    return [Cost(**line) for line in read_lines(FILE)]


def table(costs: Sequence[Cost]) -> Iterator[str]:
    """The table, in Markdown."""
    yield "| | compared with | time | generation | memory | record |"
    yield "|---|---|--:|--:|--:|---|"
    for cost in costs:
        if cost.in_table:
            numbers = (cost.measured.get(name, "") for name in ("time", "generation", "memory"))
            record = cost.record.removesuffix("/README")
            cells = (cost.what, cost.beside, *numbers, f"[{record}](../benchmarks/{cost.record}.md)")
            yield "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"


def draw(costs: Sequence[Cost], file: Path) -> None:
    """Draw a panel for each thing to compare with: a row for each model, a mark for each number."""
    # matplotlib is needed for the figure alone
    import matplotlib
    from matplotlib.figure import Figure

    from benchmarks.biography.figures import BLUE, DOTS_PER_INCH, GREY, ORANGE, STYLE

    marks = {
        "time": ("time of a training step, or of a forward of 1024 tokens", "o", BLUE, 8),
        "generation": ("time of 32 new tokens after 128", "D", ORANGE, 6),
    }
    panels = [[cost for cost in costs if cost.beside == beside] for beside in PANELS]
    with matplotlib.rc_context(STYLE | {"axes.grid.axis": "x"}):
        figure = Figure(figsize=(8, 6), layout="constrained")
        grid = figure.subplots(len(panels), 1, sharex=True, height_ratios=[len(rows) + 1 for rows in panels])
        for axes, rows, (beside, title) in zip(grid, panels, PANELS.items(), strict=True):
            for name, (label, marker, colour, size) in marks.items():
                numbers = [float(row.measured.get(name, "nan")) for row in rows]
                look = {"color": colour, "markeredgecolor": "white", "markersize": size}
                axes.plot(numbers, range(len(rows)), marker, label=label, **look)
            axes.axvline(1, color=GREY, linewidth=1, zorder=1)
            axes.set_yticks(range(len(rows)), [row.what.replace("`", "") for row in rows])
            axes.set(title=f"{title}: times as long as {beside}", ylim=(len(rows) - 0.4, -0.6))
            axes.tick_params(axis="y", length=0)
        grid[-1].set_xlim(0)
        figure.legend(*grid[-1].get_legend_handles_labels(), loc="outside lower right", ncols=2, frameon=False)
        figure.savefig(file, dpi=DOTS_PER_INCH)


@click.command()
@click.option("--images", type=click.Path(path_type=Path, file_okay=False), help="Folder to draw into.")
def main(images: Path | None) -> None:
    """Print the table, and draw."""
    costs = read_costs()
    click.echo("\n".join(table(costs)))
    if images is not None:
        draw(costs, images / "costs.png")


if __name__ == "__main__":
    main()
