"""A comparison as tables and sentences, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from scale_surgery.comparing.comparison import MARGIN
from scale_surgery.show.layout import Facts, NamedRows, sentence
from scale_surgery.show.log_lines import format_left
from scale_surgery.show.tables import format_bytes, format_count, format_nats, format_seconds

if TYPE_CHECKING:
    from scale_surgery.comparing.comparison import Comparison, Forecast, Row

LOSSES = ("learned", "forgot", "rate", "tried")
COSTS = ("trained", "step", "memory", "served", "token")


def render_forecast(forecast: Forecast) -> RenderableType:
    """Render what a comparison takes, before it starts."""
    sampled = f"{format_count(forecast.sampled_tokens)} tokens from the base"
    rows = [
        ("each method", f"{forecast.steps:,} steps, {forecast.passes:.1f} passes over the text"),
        ("to sample", "; ".join(filter(None, (sampled, forecast.begun)))),
        ("time", f"about {format_left(forecast.seconds)}, by the speed of the base"),
    ]
    return Facts("to do", rows)


def losses_of(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    """Yield the name of each method with what it learned and forgot, in nats per token, its rate, and those tried."""
    for row in comparison.rows:
        tried = sorted(done.rate for done in comparison.tries if done.method == row.method)
        rates = ", ".join(f"{rate:g}" for rate in tried)
        yield row.method, format_nats(row.learning), format_nats(row.forgetting), f"{row.rate:g}", rates


def costs_of(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    """Yield what the base and each method take."""
    if (base := comparison.base) is not None:
        yield "base", "", "", "", format_bytes(base.served_bytes), f"{1000 * base.token_seconds:.0f} ms"
    for row in comparison.rows:
        yield (
            row.method,
            format_count(row.parameters),
            f"{row.step_seconds:.2f} s",
            format_bytes(row.peak_bytes),
            format_bytes(row.served_bytes),
            f"{1000 * row.token_seconds:.0f} ms",
        )


def advice(comparison: Comparison) -> str:
    """Return a sentence on the method to take."""
    if not comparison.rows:
        return "No method could be trained: see the reasons."
    sentences = list(_verdict(comparison))
    if comparison.refused:
        sentences.append(f"Not done: {', '.join(one.method for one in comparison.refused)}.")
    return " ".join((*sentences, "One seed: differences that another seed would make are not known."))


def _verdict(comparison: Comparison) -> Iterator[str]:
    rows, chosen = comparison.rows, comparison.choice
    most, least = max(rows, key=lambda row: row.learning), min(rows, key=lambda row: row.forgetting)
    if chosen is None and most.learning <= MARGIN:
        yield "No method learned the new text: give --tokens a higher number, or look at the text."
    elif chosen is None:
        yield f"No method learned more than it forgot. {_change(most)}."
    elif len(rows) == 1:
        yield f"Only {chosen.method} was trained. {_change(chosen)}."
    else:
        yield f"Take {chosen.method}: the sum of its losses on old and new text is the lowest. {_change(chosen)}."
        alike = [row.method for row in rows if row is not chosen and chosen.gain - row.gain < MARGIN]
        if alike:
            yield f"As good, within {MARGIN:g} nats: {', '.join(alike)}."
        if most is not chosen:
            yield f"Learned most: {_change(most)}."
        if least not in (chosen, most):
            yield f"Forgot least: {_change(least)}."


def _change(row: Row) -> str:
    """Describe what a method learned and forgot."""
    learned = f"learned {row.learning:.3f}" if row.learning >= 0 else f"reads new text worse by {-row.learning:.3f}"
    is_better = row.forgetting <= -0.0005
    forgot = f"reads old text better by {-row.forgetting:.3f}" if is_better else f"forgot {abs(row.forgetting):.3f}"
    return f"{row.method} {learned} and {forgot} nats per token"


def render_comparison(comparison: Comparison) -> RenderableType:
    """Render the result: what was learned and forgotten, what it takes, and what to take."""
    losses, costs = NamedRows(LOSSES, name="nats per token"), NamedRows(COSTS, name="costs")
    for cells in losses_of(comparison):
        losses.add_row(*cells)
    for cells in costs_of(comparison):
        costs.add_row(*cells)
    refused = [sentence(f"{one.method}: not done. {one.reason}", "yellow") for one in comparison.refused]
    took = sentence(f"took {format_seconds(comparison.seconds)}", "dim")
    return Group(losses, Text(), costs, *refused, Text(), sentence(advice(comparison)), took)
