"""The page of a comparison: the plane of new against old, a table of costs, and a sentence on what to take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from scale_surgery.comparing.methods import METHODS
from scale_surgery.comparing.tables import COSTS, LOSSES, advice, costs_of, losses_of
from scale_surgery.drawing.figures import image_of
from scale_surgery.drawing.palette import DARK, LIGHT
from scale_surgery.evidence.evaluate_models import Score
from scale_surgery.show.figure_plane import plane_figure
from scale_surgery.show.pages.charts import Chart
from scale_surgery.show.pages.filling import fill, write
from scale_surgery.show.pages.report import Cells, Fact, Section
from scale_surgery.show.tables import format_count, format_nats, format_seconds

if TYPE_CHECKING:
    from scale_surgery.comparing.comparison import Comparison

BASE = "base"


def write_page(comparison: Comparison, file: Path) -> None:
    """Write the page, which refers to no other file; an existing file is replaced."""
    write(render_page(comparison), file)


def render_page(comparison: Comparison) -> str:
    """Return the page of a comparison."""
    settings = comparison.settings
    budget = f"{format_count(settings.tokens)} tokens for each method, seed {settings.seed}"
    return fill(
        "report.html",
        title=f"Methods on {Path(comparison.model).name}",
        model=budget,
        light=LIGHT._asdict(),
        dark=DARK._asdict(),
        notes=[advice(comparison), *(f"{one.method}: not done. {one.reason}" for one in comparison.refused)],
        facts=list(_facts(comparison)),
        sections=[section for section in _sections(comparison) if section.has_content],
        columns=(),
        rows=(),
        terms=list(_terms(comparison)),
    )


def _facts(comparison: Comparison) -> Iterator[Fact]:
    if (row := comparison.choice) is not None:
        yield Fact("take", row.method, f"{row.rate:g}, {format_count(row.parameters)} trained parameters")
        yield Fact("learned", format_nats(row.learning), "nats per token of new text")
        yield Fact("forgotten", format_nats(row.forgetting), "nats per token of old text")
    yield Fact("took", format_seconds(comparison.seconds))


def _sections(comparison: Comparison) -> Iterator[Section]:
    figure = plane_figure(_scores(comparison))
    yield Section(
        "New against old",
        "Loss on new text over loss on old text. The best corner is at the bottom left.",
        charts=[Chart("", "loss on new text over loss on old text, a point for each method", image_of(figure))],
        is_wide=True,
    )
    yield Section(
        "Learned and forgotten",
        "In nats per token of held-out text, against the base. The rate is the one of those tried with "
        "the lowest sum of both losses. If it is the lowest or the highest of them, another may be better.",
        cells=Cells(("", *LOSSES), list(losses_of(comparison))),
    )
    yield Section(
        "Costs",
        "Trained parameters, seconds of a step, and peak memory; bytes of the weights that are served, and time for a "
        "token with batch size 1, as transformers runs them.",
        cells=Cells(("", *COSTS), list(costs_of(comparison))),
    )


def _terms(comparison: Comparison) -> Iterator[str]:
    for row in comparison.rows:
        method = METHODS[row.method]
        yield f"{row.method}: {method.about}{'' if method.rehearses else ', without own samples'}."
    begun = f" ({comparison.begun})" if comparison.begun else ""
    yield f"Own samples: text that the base sampled{begun}, on which a method is kept close to the base."
    yield "Models compute in float32; on a GPU, they train in bfloat16. Adapters are merged before they are served."


def _scores(comparison: Comparison) -> Iterator[Score]:
    """Give the losses as `evaluate` does."""
    assert comparison.base is not None
    base = comparison.base.losses
    yield Score(BASE, "base", None, base.old, base.new)
    for row in comparison.rows:
        is_expansion = METHODS[row.method].kind == "expansion"
        yield Score(row.method, "expanded" if is_expansion else "other", BASE, row.losses.old, row.losses.new)
