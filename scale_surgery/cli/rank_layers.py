"""The command rank-layers: parse, call one function, hand its result to the console."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scale_surgery.cli.headings import Headed
from scale_surgery.cli.options import (
    BASE_CODE,
    TEXTS,
    given,
    options_from,
    output_options,
    run_options,
    set_option,
    take_fields,
)
from scale_surgery.cli.outputs import PICTURES, as_result, files_option, pictures, write_files
from scale_surgery.fields import fields_of
from scale_surgery.planning.request import Request
from scale_surgery.running.options import RunOptions
from scale_surgery.training.ranking import RankingSettings

if TYPE_CHECKING:
    from scale_surgery.show.console import Output

# layers with W12 are chosen after the ranking; a name costs nothing, and new tokens are not part of a layer
WITHOUT = ("name", "collaborative_layers", "new_tokens_init")
EXPANSION = tuple(name for name, field in fields_of(Request).items() if field.has_option and name not in WITHOUT)
EXPANSION_HELPS = {
    "layers": "Layers to rank, in the syntax of plan. Default: all.",
    "method": "Method of the planned expansion. Its costs count against the budget.",
    "variant": "Variant of the planned expansion. Default: the default of the method.",
}


@click.command(name="rank-layers", cls=Headed)
@click.argument("model")
@click.option("--data", multiple=True, required=True, type=TEXTS, help="Text to learn. Can be repeated.")
@options_from(RankingSettings, *fields_of(RankingSettings))
@options_from(Request, *EXPANSION, helps=EXPANSION_HELPS)
# --seed is the seed of the pilot; the seed of new tensors is an option of expand
@set_option(Request, without=("seed",))
@files_option(
    ".json",
    *PICTURES,
    help="Write the ranking as .json, or plot the change of the layers as .png or .svg.",
)
@click.option("--revision", help="Branch, tag or commit of a Hub repository.")
@run_options("device", code=BASE_CODE)
@output_options
def rank_layers_command(
    model: str, data: tuple[Path, ...], outputs: tuple[Path, ...], out: Output, **options: Any
) -> None:
    """Rank the layers of MODEL, a base model, by their change in a short training run on --data.

    A copy of MODEL is fine-tuned for a few steps (the pilot) and discarded. MODEL is not changed. The change of a layer
    is |W' - W| / |W|, for all weights of its MLP. The most changed layers within the budget are proposed for --layers
    of expand.

    Layers are a tie if their change is within a tenth of the change of the least changed layer that fits the budget,
    because one pilot cannot separate them. Of tied layers, the last ones are proposed, as without a pilot.

    \b
    Example: scale-surgery rank-layers MODEL --data domain.jsonl --budget 20%
    """
    from scale_surgery.checkpoint.staging import check_output_files
    from scale_surgery.drawing.figures import save_figure
    from scale_surgery.show.figure_ranking import ranking_figure
    from scale_surgery.show.tables_rank_layers import render_ranking
    from scale_surgery.text.sources import paths_of
    from scale_surgery.training.rank_layers import rank_layers

    check_output_files(outputs, [model, *paths_of(data)])
    settings = take_fields(RankingSettings, options)
    # --dtype is the dtype of the new tensors, not of the run
    run = take_fields(RunOptions, options, "device", "trust_remote_code")
    revision = options.pop("revision")
    request = Request(**{"layers": "all"} | given(options))
    result = rank_layers(model, data, request, settings, run=run, revision=revision, track=out.track)
    out.show(result, render_ranking(result))
    drawn = pictures(lambda file: save_figure(ranking_figure(result), file))
    write_files(outputs, {".json": as_result(result), **drawn}, out)
