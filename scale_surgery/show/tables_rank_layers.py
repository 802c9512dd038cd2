"""Tables of a ranking of layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from scale_surgery.command_lines import command
from scale_surgery.errors import counted
from scale_surgery.show.commands import expand_options
from scale_surgery.show.layout import NEXT, Facts, PlainTable
from scale_surgery.show.tables import render_warnings

if TYPE_CHECKING:
    from scale_surgery.training.ranking import Ranking


def render_ranking(result: Ranking) -> RenderableType:
    """Render the pilot, its layers from the most changed to the least, and the proposed layers."""
    read = f"each read {result.passes:.1f} times" if result.passes >= 1 else f"{result.passes:.1%} of them read"
    pilot = [
        (
            "trained",
            f"{result.trained_parameters:,} of {result.parameters:,} parameters, {counted(result.steps, 'step')}",
        ),
        ("text", f"{counted(result.tokens, 'token')}, {read}"),
        ("loss", f"{result.first_loss:.3f} nats per token in the first steps, {result.last_loss:.3f} in the last"),
    ]
    return Group(
        Facts(f"{result.name}: pilot", pilot),
        *render_warnings(result.warnings),
        Text(),
        _render_layers(result),
        Text(),
        Facts("proposal", list(_proposal_rows(result))),
    )


def _render_layers(result: Ranking) -> Table:
    table = PlainTable("layers")
    for name in ("place", "layer", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for place, layer in enumerate(result.layers, start=1):
        is_proposed, is_tied = layer.layer in result.proposed, layer.layer in result.tied
        mark = ", ".join(["proposed"] * is_proposed + ["tie"] * is_tied)
        is_passed_over = not mark and any(lower.layer in result.proposed for lower in result.layers[place:])
        cells = (str(place), str(layer.layer), f"{layer.change:.2%}", "over budget" if is_passed_over else mark)
        table.add_row(*cells, style="bold" if is_proposed else None)
    return table


def _proposal_rows(result: Ranking) -> Iterator[tuple[str, str]]:
    yield "budget", f"{result.budget:,} parameters, {result.budget / result.parameters:.1%} of {result.parameters:,}"
    added = f"+{result.parameters_added:,} parameters, {result.parameters_added / result.parameters:.1%}"
    yield "layers", f"{result.argument}  ({len(result.proposed)} of {len(result.layers)}, {added})"
    if result.tie:
        yield "tie", result.tie
    yield NEXT, next_command(result)


def next_command(result: Ranking) -> str:
    """Return the command that makes the proposed expansion."""
    request = replace(result.request, layers=result.argument)
    trust = ["--trust-remote-code"] * result.trust_remote_code
    return command("expand", result.model, *expand_options(request, result.revision), *trust)
