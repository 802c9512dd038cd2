"""Tables and figures of benchmarks/language, from its records.

    python -m benchmarks.language.report [--records FILE] [--size 6m] [--second de] [--images docs/images]

Forgetting at equal learning: on the way a run passes the loss of the second language at which the slowest of all runs
without a router ended; what it had lost in the first language there is interpolated between the measured points, all
on the development split.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple
from pathlib import Path
from statistics import fmean
from typing import Any

import click

from benchmarks.harness import Records
from benchmarks.language.compare import RECORDS
from benchmarks.language.figures import LOOKS, draw_curves, draw_plane
from benchmarks.language.methods import ROUTERS
from benchmarks.language.runs import Run, Scores, Subject, perplexity

REHEARSED = {"none": "", "own": "own samples", "own x4": "own samples x4", "old": "1 % old text"}
# of the paper (SCALE, arXiv 2511.03270): averages of Table 1 in percent, of five English tasks and three Korean ones,
# and perplexities of English and Korean at the end, read off figures 2 and 9
PAPER = {
    "base": (47.14, 51.15, 10.42, 16.9),
    "full": (42.79, 57.21, 12.49, 6.51),
    "LoRA": (42.59, 57.25, 12.49, 6.50),
    "depth": (44.55, 55.81, 11.24, 6.53),
    "freeze": (42.44, 54.67, 12.62, 6.86),
    "preserve": (46.09, 53.14, 10.57, 7.97),
    "adapt attn": (46.15, 55.09, 10.75, 6.5),
    "adapt attn, cosine": (46.49, 55.50, 10.64, 6.55),
}


def ended(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs that were scored at the end, those that differ by their seed together, by what they rehearsed and method."""
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        if run.scores is not None:
            key = (run.key.method, run.key.rehearse, run.key.weight, run.key.rate, run.key.tokens)
            groups.setdefault(key, []).append(run)
    methods = ["base", *LOOKS]
    orders = [(list(REHEARSED).index(key[1]), methods.index(key[0]), key[2:]) for key in groups]
    return [group for _, group in sorted(zip(orders, groups.values(), strict=True), key=lambda entry: entry[0])]


def rows_of(groups: Sequence[list[Run]]) -> Iterator[tuple[str, str, list[Scores], list[Run]]]:
    """A row for each method and for each of its ends: name, what was rehearsed, scores, runs."""
    for group in groups:
        key = group[0].key
        yield key.method, key.rehearse, [run.scores for run in group if run.scores is not None], group
        for end in group[0].ends:
            yield f"{key.method}, {end}", key.rehearse, [run.ends[end] for run in group], group


def perplexities(groups: Sequence[list[Run]]) -> Iterator[str]:
    """The table of perplexities without a router, in Markdown; KL is KL(base || model) on new text."""
    base = _base_of(groups)
    level = max(run.points[-1].new for group in groups for run in group if run.key.method != "base")
    yield "| method | rehearsed | trained | rate | old | change | new | at equal learning | KL | s a step | seeds |"
    yield "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    yield f"| base |  |  |  | {math.exp(base.old.nats):.1f} |  | {math.exp(base.new.nats):.1f} |  |  |  |  |"
    for name, _, scores, group in rows_of(groups):
        end = name.removeprefix(f"{group[0].key.method}, ")
        if group[0].key.method != "base" and end not in ROUTERS:
            old, new = perplexity(scores, "old"), perplexity(scores, "new")
            trained, rate = f"{group[0].parameters / 1e6:.2f}M", f"{group[0].key.rate:g}"
            change, equal = f"{old / math.exp(base.old.nats) - 1:+.1%}", ""
            if end == name:
                lost = fmean(at_equal(run, level) - run.points[0].old for run in group)
                equal = f"{math.exp(lost) - 1:+.1%}"
            far = _mean(score.divergence for score in scores)
            seconds = _mean(run.step_seconds for run in group) if end == name else ""
            cells = (name, _rehearsed(group), trained, rate, f"{old:.1f}", change, f"{new:.1f}", equal, far, seconds)
            yield f"| {' | '.join(cells)} | {len(group)} |"


def _mean(values: Iterable[float | None]) -> str:
    """Of what was measured; nothing where a record has it not."""
    known = [value for value in values if value is not None]
    return f"{fmean(known):.2f}" if known else ""


def routed(groups: Sequence[list[Run]]) -> Iterator[str]:
    """The table of perplexities with each router, in Markdown."""
    base = _base_of(groups)
    routers = list(dict.fromkeys(router for group in groups for router in group[0].ends if router in ROUTERS))
    yield f"| method | rehearsed | {' | '.join(f'{router}: old | new' for router in routers)} |"
    yield f"|---|---|{'--:|' * 2 * len(routers)}"
    for group in (group for group in groups if ROUTERS.keys() & group[0].ends.keys()):
        yield f"| {group[0].key.method} | {_rehearsed(group)} | {_routed_cells(group, routers, base)} |"


def _routed_cells(group: list[Run], routers: Sequence[str], base: Scores) -> str:
    cells = []
    for router in routers:
        if router not in group[0].ends:
            cells += ["", ""]
            continue
        scores = [run.ends[router] for run in group]
        old, new = perplexity(scores, "old"), perplexity(scores, "new")
        cells += [f"{old:.1f} ({old / math.exp(base.old.nats) - 1:+.1%})", f"{new:.1f}"]
    return " | ".join(cells)


def _rehearsed(group: list[Run]) -> str:
    """What was rehearsed, and with which weight where that is not 1."""
    key = group[0].key
    return REHEARSED[key.rehearse] + (f", weight {key.weight:g}" if key.weight != 1 else "")


def _base_of(groups: Sequence[list[Run]]) -> Scores:
    """What the base scores."""
    base = next(group[0] for group in groups if group[0].key.method == "base")
    assert base.scores is not None
    return base.scores


def at_equal(run: Run, level: float) -> float:
    """Nats of the first language where a run passed a loss of the second."""
    for before, after in zip(run.points, run.points[1:], strict=False):
        if after.new <= level <= before.new:
            share = (before.new - level) / (before.new - after.new)
            return before.old + share * (after.old - before.old)
    return run.points[-1].old


DOWNSTREAM = ("next token, old", "new", "parallel, old", "new", "continuation, old", "new", "translation", "back")


def downstream(groups: Sequence[list[Run]]) -> Iterator[str]:
    """The table of what is asked beside perplexity, in Markdown."""
    yield f"| method | rehearsed | {' | '.join(DOWNSTREAM)} |"
    yield f"|---|---|{'--:|' * len(DOWNSTREAM)}"
    for name, _, scores, group in rows_of(groups):
        if asked := [shares for score in scores if (shares := _shares(score))]:
            cells = [f"{fmean(shares):.1%}" for shares in zip(*asked, strict=True)]
            yield f"| {_with_rate(name, group, groups)} | {_rehearsed(group)} | {' | '.join(cells)} |"


def _shares(scores: Scores) -> tuple[float, ...]:
    """What `DOWNSTREAM` names; nothing where it was not asked."""
    if scores.ranking is None or scores.parallel is None:
        return ()
    return (scores.old.accuracy, scores.new.accuracy, *scores.parallel, *astuple(scores.ranking))


def _with_rate(name: str, group: list[Run], groups: Sequence[list[Run]]) -> str:
    """A name, with the learning rate where the method stands with several."""
    rates = {runs[0].key.rate for runs in groups if runs[0].key.method == group[0].key.method}
    return f"{name}, {group[0].key.rate:g}" if len(rates) > 1 else name


BESIDE_PAPER = (
    *("paper: tasks, English", "Korean", "perplexity, English", "Korean"),
    *("here: next token, old", "new", "perplexity, old", "new"),
)


def beside_paper(groups: Sequence[list[Run]]) -> Iterator[str]:
    """The paper's rows beside ours without rehearsal, in Markdown."""
    yield f"| method | {' | '.join(BESIDE_PAPER)} |"
    yield f"|---|{'--:|' * len(BESIDE_PAPER)}"
    for name, rehearse, scores, group in rows_of(groups):
        if rehearse == "none" and name in PAPER:
            accuracies = (f"{fmean(getattr(score, part).accuracy for score in scores):.1%}" for part in ("old", "new"))
            ours = [f"{value:.1f}" for value in (perplexity(scores, "old"), perplexity(scores, "new"))]
            cells = (*(f"{value:.2f}" for value in PAPER[name]), *accuracies, *ours)
            yield f"| {_with_rate(name, group, groups)} | {' | '.join(cells)} |"


@click.command()
@click.option("--records", type=click.Path(path_type=Path, exists=True, dir_okay=False), default=RECORDS)
@click.option("--size", default="6m", show_default=True, help="Size of the base.")
@click.option("--second", default="de", show_default=True, help="Language that was learned.")
@click.option("--without", "hidden", multiple=True, metavar="NAME", help="Method to leave out; can be repeated.")
@click.option("--images", type=click.Path(path_type=Path, file_okay=False), help="Folder to draw into.")
def main(records: Path, size: str, second: str, hidden: tuple[str, ...], images: Path | None) -> None:
    """Print the tables, and draw."""
    subject = Subject(size, second)
    runs = [run for run in Records(records, Run).read() if run.key.subject == subject and run.key.method not in hidden]
    groups = ended(runs)
    for table in (perplexities, routed, downstream, beside_paper):
        click.echo("\n".join(table(groups)) + "\n")
    if images is not None:
        name = f"language-{records.stem}-{size}-{second}"
        draw_plane([*rows_of(groups)], images / f"{name}.png")
        draw_curves(groups, images / f"{name}-curves.png")


if __name__ == "__main__":
    main()
