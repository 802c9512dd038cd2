"""The command rank-layers: parse, call one function, hand its result to the console."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scale_surgery.cli.headings import Headed
from scale_surgery.cli.options import (
    BASE_CODE,
    OLD_HELP,
    TEXTS,
    given,
    options_from,
    output_options,
    run_options,
    take,
)
from scale_surgery.cli.outputs import PICTURES, as_result, files_option, pictures, write_files
from scale_surgery.fields import fields_of
from scale_surgery.planning.methods import DEFAULT_METHOD, METHODS
from scale_surgery.planning.request import Request
from scale_surgery.running.options import RunOptions
from scale_surgery.training.pilot_settings import PilotSettings
from scale_surgery.training.ranking import SCORES

if TYPE_CHECKING:
    from scale_surgery.show.console import Output

EXPANSION = ("layers", "method", "variant", "collaborate", "ratio", "copies")
EXPANSION_HELPS = {
    "layers": "Layers to choose among, written as for plan. Default: all.",
    "method": "Method of the expansion that is planned: its costs count against the budget.",
    "variant": "Variant of that expansion. Default: adapt with --old, else that of the method.",
}


@click.command(name="rank-layers", cls=Headed)
@click.argument("model")
@click.option(
    "--data", multiple=True, required=True, type=TEXTS, help="Text with what is to be learned; can be repeated."
)
@click.option(
    "--old",
    multiple=True,
    type=TEXTS,
    help=f"{OLD_HELP} With it, layers for W12 are proposed too.",
)
@click.option(
    "--budget",
    default="30%",
    show_default=True,
    help="Parameters that the expansion may add: a share of the base's, such as 30%, or a number, such as 200M.",
)
@click.option(
    "--score",
    type=click.Choice(SCORES),
    default="relative-norm",
    show_default=True,
    help="Order layers by the relative norm of their change, or by its directions (effective rank).",
)
@options_from(Request, *EXPANSION, helps=EXPANSION_HELPS)
@options_from(PilotSettings, *fields_of(PilotSettings))
@files_option(".json", *PICTURES, help="Write the ranking as .json, or draw the scores of layers as .png or .svg.")
@click.option("--details", is_flag=True, help="Show the scores of each matrix too.")
@click.option("--revision", help="Branch, tag or commit of a Hub repository.")
@run_options(
    "device",
    code=BASE_CODE,
)
@output_options
def rank_layers_command(
    model: str,
    data: tuple[Path, ...],
    old: tuple[Path, ...],
    outputs: tuple[Path, ...],
    details: bool,
    out: Output,
    **options: Any,
) -> None:
    """Rank the layers of MODEL, a base model, by what a short training run changes in them.

    Copies of MODEL are fine-tuned on --data for a few steps (pilots) and thrown away; MODEL is only read. Layers are
    ordered by how much their weights changed: by the relative norm of the change, or by its directions, the effective
    rank of it. The best layers that fit the budget are proposed for --layers of expand. A score that another pilot, or
    half of the steps, would turn round is a tie, and of tied layers the last ones are proposed.

    With --old, layers for --collaborative-layers are proposed too: those in which W12, which writes into the base's
    hidden state, helps more than it disturbs old text. The layers below them are the preserved depth, L_fp.

    \b
    Example: scale-surgery rank-layers MODEL --data domain.jsonl --budget 20%
    W12 too: scale-surgery rank-layers MODEL --data domain.jsonl --old general.txt
    """
    from scale_surgery.checkpoint.staging import check_output_files
    from scale_surgery.show.figure_rank_layers import plot_ranking
    from scale_surgery.show.tables_rank_layers import render_budget, render_ranking
    from scale_surgery.training.rank_layers import prepare_ranking, run_ranking
    from scale_surgery.training.ranking import RankingRequest

    check_output_files(outputs, [model, *data, *old])
    pilot = take(PilotSettings, options)
    wanted = given({name: options.pop(name) for name in EXPANSION})
    if old and "collaborative_layers" in METHODS[wanted.get("method", DEFAULT_METHOD)].options:
        wanted = {"variant": "adapt"} | wanted
    expansion = Request(**{"layers": "all"} | wanted)
    request = RankingRequest(expansion, options.pop("budget"), options.pop("score"))
    run = take(RunOptions, options)
    job = prepare_ranking(model, data, pilot, request, old=old, run=run, **options)
    result = run_ranking(job, out.track, tell=lambda budget: out.say(render_budget(budget)))
    for warning in result.warnings:
        out.warn(warning)
    out.show(result, render_ranking(result, details=details))
    drawn = pictures(lambda file: plot_ranking(result, file))
    write_files(outputs, {".json": as_result(result), **drawn}, out)
