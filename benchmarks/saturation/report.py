"""The tables and the figure of benchmarks/saturation, from the records alone.

python -m benchmarks.saturation.report [--images docs/images]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import click

from benchmarks.harness import Records
from benchmarks.saturation.__main__ import FULL, Row, choose
from benchmarks.saturation.bases import ARCHITECTURE
from benchmarks.saturation.runs import METHODS, Run, Settings

RECORDS = Path(__file__).with_name("runs.jsonl")
# settings of the first run, and levels of learning at which the gap is listed beside the one that was chosen
FIRST = Settings(asked=200, steps=600, every=20)
LEVELS = (0.3, 0.4, 0.5, 0.6)
LARGER_ROW = "larger base, full"
# okabe and ito, and a shape for each
STYLES = dict(
    zip(
        (*METHODS, LARGER_ROW),
        (("#000000", "o"), ("#999999", "s"), ("#0072b2", "^"), ("#d55e00", "D"), ("#009e73", "v"), ("#cc79a7", "P"),
         ("#e69f00", "X")),
        strict=True,
    )
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """Runs of a method at one saturation, a seed each, at the rate that the first seed chose.

    Attributes:
        base: Share of right answers of the base, a mean.
        kept: Shares of these that are kept at equal learning; None of a run that never learned as much.
        rate: Learning rate.
        parameters: Trained parameters.
    """

    base: float
    kept: tuple[float | None, ...]
    rate: float
    parameters: int

    @property
    def mean(self) -> float | None:
        """Mean over seeds; None if a seed never learned as much."""
        known = [share for share in self.kept if share is not None]
        return fmean(known) if len(known) == len(self.kept) else None


Cells = Mapping[tuple[str, bool], Mapping[float, Cell]]


def cells(runs: Iterable[Run]) -> Cells:
    """Group runs by row and saturation, and take those at the chosen rate."""
    groups: dict[Row, dict[float, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        is_larger = run.key.base.inner_width != ARCHITECTURE["intermediate_size"]
        name = LARGER_ROW if is_larger else run.key.method
        groups[name, run.key.rehearses][run.key.base.people / FULL].append(run)
    return {row: {level: _cell(some) for level, some in sorted(levels.items())} for row, levels in groups.items()}


def _cell(runs: Sequence[Run]) -> Cell:
    rate = choose([run for run in runs if run.key.seed == 0]).key.rate
    at_rate = sorted((run for run in runs if run.key.rate == rate), key=lambda run: run.key.seed)
    kept = tuple(None if run.matched is None else run.matched.kept_test for run in at_rate)
    return Cell(fmean(run.base[0] for run in at_rate), kept, rate, at_rate[0].parameters)


def runs_of(settings: Settings, file: Path = RECORDS) -> list[Run]:
    """Read the runs of a file with these settings; those of a pilot have others."""
    return [run for run in Records(file, Run).read() if run.key.settings == settings]


def recorded(file: Path = RECORDS) -> Cells:
    """Read the cells of the run that decides."""
    return cells(runs_of(Settings(), file))


def gaps(runs: Sequence[Run], method: str) -> list[str]:
    """Lay out the gap of a method at several levels of learning, in points for each seed, at the rates of the table."""
    groups: dict[float, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run.key.rehearses and run.key.base.inner_width == ARCHITECTURE["intermediate_size"]:
            groups[run.key.base.people / FULL][run.key.method].append(run)
    places = [level for level in sorted(groups) if method in groups[level]]
    lines = [
        f"| learned | {' | '.join(f'{_people(place)} people' for place in places)} |",
        f"|--:|{'---|' * len(places)}",
    ]
    for learned in LEVELS:
        shown = [", ".join(_gaps(groups[place], method, learned)) for place in places]
        lines.append(f"| {100 * learned:.0f} % | {' | '.join(shown)} |")
    return lines


def _gaps(by_method: Mapping[str, Sequence[Run]], method: str, learned: float) -> Iterable[str]:
    kept = [_kept(by_method[name], learned) for name in (method, "full")]
    for seed in sorted(kept[0].keys() & kept[1].keys()):
        own, full = (each[seed] for each in kept)
        yield "not learned" if own is None or full is None else f"{100 * (own - full):+.1f}"


def _kept(runs: Sequence[Run], learned: float) -> dict[int, float | None]:
    rate = choose([run for run in runs if run.key.seed == 0]).key.rate
    points = {run.key.seed: run.at(learned) for run in runs if run.key.rate == rate}
    return {seed: None if point is None else point.kept_test for seed, point in points.items()}


def table(grouped: Cells) -> list[str]:
    """Lay out the share that is kept, in percent: mean and range over seeds."""
    levels = sorted({level for by_level in grouped.values() for level in by_level})
    lines = [
        f"| method | own samples | trained | {' | '.join(f'{_people(level)} people' for level in levels)} |",
        f"|---|---|--:|{'--:|' * len(levels)}",
    ]
    for (name, rehearses), by_level in sorted(
        grouped.items(), key=lambda item: (not item[0][1], [*STYLES].index(item[0][0]))
    ):
        shown = [_shown(by_level.get(level)) for level in levels]
        trained = next(iter(by_level.values())).parameters
        lines.append(f"| {name} | {'yes' if rehearses else 'no'} | {trained:,} | {' | '.join(shown)} |")
    return lines


def _shown(cell: Cell | None) -> str:
    if cell is None:
        return ""
    known = [100 * share for share in cell.kept if share is not None]
    if cell.mean is None:
        missing = len(cell.kept) - len(known)
        return "; ".join([*(f"{share:.1f}" for share in known), f"{missing} not learned" if known else "not learned"])
    spread = f" ({min(known):.1f} to {max(known):.1f})" if len(known) > 1 else ""
    return f"{100 * cell.mean:.1f}{spread}"


def _people(level: float) -> str:
    return f"{round(level * FULL):,}"


def draw(grouped: Cells, file: Path) -> None:
    """Draw forgetting over saturation, with own samples and without."""
    import matplotlib
    from matplotlib.figure import Figure

    from benchmarks.biography.figures import DOTS_PER_INCH, STYLE

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.2, 3.6), layout="constrained")
        for axes, rehearses in zip(figure.subplots(1, 2), (True, False), strict=True):
            for name, (colour, marker) in STYLES.items():
                by_level = grouped.get((name, rehearses), {})
                learned = {level: cell for level, cell in by_level.items() if cell.mean is not None}
                if not learned:
                    continue
                means = [100 * (1 - cell.mean) for cell in learned.values()]
                axes.plot(list(learned), means, color=colour, marker=marker, label=name)
                # a small mark for each seed
                for level, cell in learned.items():
                    lost = [100 * (1 - share) for share in cell.kept]
                    axes.plot([level] * len(lost), lost, color=colour, marker=marker, markersize=3, linestyle="none")
            axes.set_xscale("log", base=2)
            ticks = sorted({level for by_level in grouped.values() for level in by_level})
            axes.set_xticks(ticks, [*map(_people, ticks)])
            axes.set_xlabel("people that the base was shown")
            axes.set_title("with own samples" if rehearses else "without")
            axes.set_ylim(bottom=0)
        figure.axes[0].set_ylabel("right answers that are lost, %")
        figure.axes[0].legend(fontsize=8)
        figure.savefig(file, dpi=DOTS_PER_INCH)


@click.command()
@click.option("-o", "--records", type=click.Path(path_type=Path, dir_okay=False), default=RECORDS, help="File of runs.")
@click.option("--images", type=click.Path(path_type=Path, file_okay=False), help="Draw the figure into this folder.")
def main(records: Path, images: Path | None) -> None:
    """Print the tables, and draw the figure."""
    grouped = recorded(records)
    tables = [table(grouped), *(gaps(runs_of(settings, records), "preserve") for settings in (Settings(), FIRST))]
    click.echo("\n\n".join("\n".join(lines) for lines in tables))
    if images is not None:
        images.mkdir(parents=True, exist_ok=True)
        draw(grouped, images / "saturation.png")


if __name__ == "__main__":
    main()
