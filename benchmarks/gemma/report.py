"""The table and the figure of benchmarks/gemma, from the records alone.

python -m benchmarks.gemma.report [--images docs/images]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import click

from benchmarks.gemma.runs import Run, Scores, Settings
from benchmarks.harness import Records

RECORDS = Path(__file__).with_name("runs.jsonl")
BASE, SAMPLED = "base", "base, sampled"
# columns of the table in docs/results.md
EXCERPT = ("method", "own samples", "rate", "seed", "trained", "people", "Korean", "English", "kept", "s")
# okabe and ito, and a shape for each
STYLES = {
    "full": ("#000000", "o"),
    "LoRA MLP": ("#999999", "s"),
    "OSF": ("#56b4e9", "h"),
    "preserve": ("#0072b2", "^"),
    "adapt": ("#d55e00", "D"),
    "gated": ("#009e73", "v"),
    "grow-freeze": ("#cc79a7", "P"),
    "grow-train": ("#e69f00", "X"),
}


@dataclass(frozen=True)
class Line:
    """A line of the table: a run without its router, or with it."""

    run: Run
    scores: Scores
    is_routed: bool = False

    @property
    def name(self) -> str:
        """What it is called."""
        return f"{self.run.key.method}, routed" if self.is_routed else self.run.key.method

    @property
    def kept(self) -> float:
        """Mean share of the groups of probes."""
        return fmean(self.scores.kept.values())


def lines(runs: Iterable[Run]) -> list[Line]:
    """Return lines for the runs with the settings of the table: bases, rows with own samples, then the others."""
    order = [BASE, SAMPLED, *STYLES]
    some = sorted(
        (run for run in runs if run.key.settings == Settings()),
        key=lambda run: (
            run.parameters > 0,
            not run.key.rehearses,
            order.index(run.key.method),
            -run.key.rate,
            run.key.seed,
        ),
    )
    return [
        Line(run, scores, is_routed)
        for run in some
        for scores, is_routed in ((run.scores, False), (run.routed, True))
        if scores is not None
    ]


def table(found: list[Line], columns: Sequence[str] = ()) -> list[str]:
    """Lay out what a run was, its scores, and what a step cost; or some of these columns."""
    cells = [_cells(line) for line in found]
    columns = columns or list(cells[0])
    return [
        f"| {' | '.join(columns)} |",
        f"|{'---|' * 2}{'--:|' * (len(columns) - 2)}",
        *(f"| {' | '.join(row[column] for column in columns)} |" for row in cells),
    ]


def _cells(line: Line) -> dict[str, str]:
    run, scores = line.run, line.scores
    is_base = not run.parameters
    return {
        "method": line.name,
        "own samples": "" if is_base else "yes" if run.key.rehearses else "no",
        "rate": "" if is_base else f"{run.key.rate:g}",
        "seed": "" if is_base else f"{run.key.seed}",
        "trained": "" if is_base else f"{run.parameters / 1e6:.1f} M",
        "people": f"{100 * scores.people:.0f}",
        "Korean": f"{scores.second:.2f}",
        "English": f"{scores.english:.2f}",
        **{group: f"{100 * share:.0f}" for group, share in scores.kept.items()},
        "kept": f"{100 * line.kept:.1f}",
        "s": "" if is_base else f"{run.step_seconds:.0f}",
        "GB": "" if is_base else f"{run.peak_bytes / 1e9:.1f}",
    }


def draw(found: list[Line], file: Path) -> None:
    """Draw what is known of new people over what is lost, a line through the rates of each method in its first seed."""
    import matplotlib
    from matplotlib.figure import Figure

    from benchmarks.biography.figures import DOTS_PER_INCH, STYLE

    bases = {line.name: line for line in found if not line.run.parameters}
    rows: dict[tuple[str, bool, bool, int], list[Line]] = defaultdict(list)
    for line in found:
        if line.run.parameters:
            rows[line.run.key.method, line.run.key.rehearses, line.is_routed, line.run.key.seed].append(line)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.2, 3.8), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for (method, rehearses, is_routed, seed), some in rows.items():
            colour, marker = STYLES[method]
            some = sorted(some, key=lambda line: line.run.key.rate)
            title = method + (", routed" if is_routed else ", own samples" if rehearses else "")
            look = {
                "color": colour,
                "marker": "*" if is_routed else marker,
                "markersize": 11 if is_routed else 6,
                "markerfacecolor": colour if rehearses or is_routed else "white",
                # of a second seed, there is one rate
                "linestyle": "none" if seed else "-" if rehearses else ":",
                "linewidth": 1,
                "label": None if seed else title,
            }
            people = [100 * line.scores.people for line in some]
            left.plot([100 * (1 - line.kept) for line in some], people, **look)
            english = bases[BASE].scores.english
            right.plot([line.scores.english - english for line in some], people, **look)
        for axes in (left, right):
            axes.axvline(0, color="#999999", linewidth=0.8)
            axes.axhline(100 * bases[BASE].scores.people, color="#999999", linewidth=0.8, linestyle="--")
        left.set_ylabel("questions about new people answered, %")
        left.set_xlabel("probes that are lost, %")
        right.set_xlabel("English forgotten, nats per token")
        right.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        figure.savefig(file, dpi=DOTS_PER_INCH)


@click.command()
@click.option("-o", "--records", type=click.Path(path_type=Path, dir_okay=False), default=RECORDS, help="File of runs.")
@click.option("--images", type=click.Path(path_type=Path, file_okay=False), help="Draw the figure into this folder.")
def main(records: Path, images: Path | None) -> None:
    """Print the table, and draw the figure."""
    found = lines(Records(records, Run).read())
    click.echo("\n".join(table(found)))
    if images is not None:
        images.mkdir(parents=True, exist_ok=True)
        draw(found, images / "gemma.png")


if __name__ == "__main__":
    main()
