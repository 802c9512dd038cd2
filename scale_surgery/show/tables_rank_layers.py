"""What a ranking of layers looks like in a terminal; see `tables`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from scale_surgery.errors import counted
from scale_surgery.planning.methods import DEFAULT_METHOD, METHODS
from scale_surgery.planning.request import Request, complete
from scale_surgery.show.tables import facts, format_bytes, format_seconds, plain_table

if TYPE_CHECKING:
    from scale_surgery.training.pilot_settings import PilotBudget
    from scale_surgery.training.ranking import LayerScore, Proposal, Ranking, ScoreName, W12Estimate

TRAINED = {"mlp": "the MLP matrices", "full": "every parameter"}
# what `expand` has to be told again, beside layers and method, where it is not what the method does anyway
REPEATED = ("variant", "copies", "collaborate", "ratio")
# "rank" would be the order of the layers too
SCORE_NAMES: dict[ScoreName, str] = {"relative-norm": "change", "effective-rank": "directions"}


def render_ranking(result: Ranking, *, details: bool = False) -> RenderableType:
    """The pilot, its layers from the best to the last, and what is proposed."""
    parts: list[RenderableType] = [_render_pilot(result), Text(), _render_layers(result), Text()]
    if result.depth is not None:
        parts += [_render_w12(result.depth), Text()]
    if details:
        parts += [_render_matrices(result, "relative-norm"), Text(), _render_matrices(result, "effective-rank"), Text()]
    return Group(*parts, facts("proposal", list(_proposal_rows(result))))


def _render_pilot(result: Ranking) -> RenderableType:
    pilot = result.pilot
    memory = "" if pilot.peak_memory_bytes is None else f"; peak memory {format_bytes(pilot.peak_memory_bytes)}"
    budget = pilot.budget
    rows = [
        ("trained", f"{TRAINED[pilot.settings.trains]}, {pilot.trained_parameters:,} of {result.parameters:,}"),
        ("text", f"{counted(pilot.tokens, 'token')}, {_passes(pilot.passes)}"),
        ("loss", f"{pilot.first_loss:.3f} nats per token in the first steps, {pilot.last_loss:.3f} in the last"),
        ("took", f"{_count(budget.pilots, budget.steps)}, {format_seconds(pilot.seconds)}{memory}"),
    ]
    return facts(f"{result.name}: pilot", rows)


def render_budget(budget: PilotBudget) -> RenderableType:
    """What pilots will read, and how long that takes: said before the first step."""
    read = f"{counted(budget.tokens, 'token')}, {_passes(budget.passes)}"
    time = "" if budget.seconds is None else f"; about {format_seconds(budget.seconds)}"
    cut = " (fewer, for --minutes)" if budget.is_cut else ""
    return facts("", [("ahead", f"{_count(budget.pilots, budget.steps)}{cut}, {read}{time}")])


def _count(pilots: int, steps: int) -> str:
    return counted(steps, "step") if pilots == 1 else f"{pilots} pilots of {counted(steps, 'step')}"


def _passes(passes: float) -> str:
    return f"each read {passes:.1f} times" if passes >= 1 else f"{passes:.1%} of them read"


def _render_layers(result: Ranking) -> Table:
    most = max(_most(layer) for layer in result.layers)
    table = plain_table("layers")
    names = ["place", "layer", "change", "\N{PLUS-MINUS SIGN}", f"directions\nof {most}", "\N{PLUS-MINUS SIGN}"]
    for name in (*names, "place by\n" + _other(result)):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    layers = {layer.layer: layer for layer in result.layers}
    others = result.order(result.proposals[1].score)
    for place, number in enumerate(result.order(result.score), start=1):
        is_chosen = number in result.proposals[0].layers
        row = [str(place), str(number), *_scores(layers[number]), str(others.index(number) + 1), _mark(result, number)]
        table.add_row(*row, style="bold" if is_chosen else None)
    return table


def _render_w12(depth: W12Estimate) -> Table:
    """What W12 of each layer promises on new text, and what a step of it costs on old text."""
    table = plain_table("W12")
    for name in ("layer", "gradient", "KL of a step", "worth"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in depth.layers:
        numbers = (f"{one.gradient_energy**0.5:.3g}", f"{one.divergence:.2g}", f"{one.worth:.3g}")
        table.add_row(str(one.layer), *numbers, style="bold" if one.layer in depth.proposed else None)
    return table


def _scores(layer: LayerScore) -> list[str]:
    change, directions = layer.noise("relative-norm"), layer.noise("effective-rank")
    return [_change(layer.relative_norm), _change(change), f"{layer.effective_rank:.1f}", f"{directions:.1f}"]


def _mark(result: Ranking, layer: int) -> str:
    proposal, order = result.proposals[0], result.order(result.score)
    chosen = proposal.layers
    is_tie = ", tie" if layer in proposal.tied else ""
    if layer not in chosen:
        is_passed_over = any(other in chosen for other in order[order.index(layer) :])
        return "tie" if is_tie else "over budget" if is_passed_over else ""
    is_w12 = ", W12" if result.depth is not None and layer in result.depth.proposed else ""
    return f"chosen{is_w12}{is_tie}"


def _other(result: Ranking) -> str:
    return SCORE_NAMES[result.proposals[1].score]


def _most(layer: LayerScore) -> int:
    return sum(matrix.singular_values for matrix in layer.matrices.values())


def _change(value: float) -> str:
    return f"{value:.2%}" if value < 10 else f"{value:.0%}"


def _render_matrices(result: Ranking, score: ScoreName) -> Table:
    title = {
        "relative-norm": "change of each matrix",
        "effective-rank": "directions of the change of each matrix",
    }
    table = plain_table(title[score])
    table.add_column("layer", justify="right")
    for role, matrix in result.layers[0].matrices.items():
        table.add_column(
            role if score == "relative-norm" else f"{role}\nof {matrix.singular_values}", justify="right", no_wrap=True
        )
    for layer in result.layers:
        cells = [
            _change(one.relative_norm) if score == "relative-norm" else f"{one.effective_rank:.1f}"
            for one in layer.matrices.values()
        ]
        table.add_row(str(layer.layer), *cells)
    return table


def _proposal_rows(result: Ranking) -> Iterator[tuple[str, str]]:
    first, second = result.proposals
    yield "budget", f"{result.budget:,} parameters, {result.budget / result.parameters:.1%} of {result.parameters:,}"
    yield f"by {SCORE_NAMES[first.score]}", _describe(first, result)
    if first.tied:
        yield "", result.tie
    same = second.layers == first.layers
    yield f"by {SCORE_NAMES[second.score]}", "the same layers" if same else _describe(second, result)
    if result.depth is not None:
        yield "W12", f"--collaborative-layers {result.depth.argument}  ({_depth(result.depth, first)})"
    elif "collaborative_layers" in METHODS[result.request.method].options:
        yield "W12", "not asked for; --old FILES, with text that the base knows, has its layers proposed too"
    yield "next", next_command(result)


def _depth(depth: W12Estimate, proposal: Proposal) -> str:
    worth = {one.layer: one.worth for one in depth.layers}
    whole = sum(worth[layer] for layer in proposal.layers)
    share = sum(worth[layer] for layer in depth.proposed) / whole if whole else 1.0
    return (
        f"preserved depth (L_fp) {depth.preserved_depth}, {share:.0%} of the worth, by {depth.old_tokens:,} old tokens"
    )


def _describe(proposal: Proposal, result: Ranking) -> str:
    count, share = len(proposal.layers), proposal.parameters_added / result.parameters
    counted = f"{count} of {len(result.layers)} ranked layers"
    return f"--layers {proposal.argument}  ({counted}, +{proposal.parameters_added:,} parameters, {share:.1%})"


def next_command(result: Ranking) -> str:
    """The command that makes the proposed expansion."""
    words = ["scale-surgery", "expand", result.model]
    words += ["--revision", result.revision] if result.revision else []
    words += ["--layers", result.proposals[0].argument]
    words += [] if result.request.method == DEFAULT_METHOD else ["--method", result.request.method]
    usual = complete(Request("all", method=result.request.method))
    for name in REPEATED:
        value = getattr(result.request, name)
        if value != getattr(usual, name):
            words += [f"--{name}", str(value)]
    if result.depth is not None and result.depth.proposed != result.proposals[0].layers:
        words += ["--collaborative-layers", result.depth.argument]
    return shlex.join(words)
