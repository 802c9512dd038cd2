"""The command rank-layers: parse, call one function, hand its result to the console."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scale_surgery.cli.options import FILE, TEXTS, Command, add_options, output_options, take
from scale_surgery.planning.methods import DEFAULT_METHOD, METHODS, variants

if TYPE_CHECKING:
    from scale_surgery.show.console import Output

PILOT = ("trains", "steps", "batch_size", "sequence_length", "learning_rate", "seed", "bf16", "gradient_checkpointing")
EXPANSION = ("layers", "method", "variant", "collaborate", "ratio", "copies")


def pilot_options(command: Command) -> Command:
    """Add what makes `PilotSettings`; defaults stand in the dataclass."""
    options = [
        click.option(
            "--train",
            "trains",
            type=click.Choice(["mlp", "full"]),
            help="mlp: the matrices of all MLPs. full: every parameter. Default: mlp.",
        ),
        click.option("--steps", type=int, help="Optimizer steps. Default: 200."),
        click.option("--batch-size", type=int, help="Sequences in a step. Default: 8."),
        click.option("--sequence-length", type=int, help="Tokens of a sequence. Default: the context, at most 1024."),
        click.option("--learning-rate", type=float, help="Highest learning rate. Default: 0.0001."),
        click.option("--seed", type=int, help="Seed of the order of the data. Default: 0."),
        click.option("--bf16/--no-bf16", default=None, help="Compute in bfloat16. Default: as the base is stored."),
        click.option(
            "--gradient-checkpointing",
            is_flag=True,
            default=None,
            help="Compute activations again in the backward pass instead of keeping them.",
        ),
    ]
    return add_options(command, options)


def expansion_options(command: Command) -> Command:
    """Add what says which expansion is to be paid for."""
    options = [
        click.option("--layers", help="Layers to choose among, as --layers of expand. Default: all."),
        click.option("--method", type=click.Choice(list(METHODS)), help="Of the expansion to be. Default: scale."),
        click.option(
            "--variant",
            type=click.Choice(variants()),
            help="Of the expansion to be. Default: that of the method, with --old adapt.",
        ),
        click.option("--collaborate", type=click.Choice(["attn", "ffn", "both"]), help="As in expand. Default: attn."),
        click.option("--ratio", type=float, help="As in expand (scale). Default: 0.125."),
        click.option("--copies", type=int, help="As in expand (grow). Default: 2."),
    ]
    return add_options(command, options)


@click.command(name="rank-layers")
@click.argument("model")
@click.option("--data", multiple=True, required=True, type=TEXTS, help="What is to be learned, repeatable.")
@click.option(
    "--old",
    multiple=True,
    type=TEXTS,
    help="Text that tells what the base knows, repeatable: proposes layers for W12 too.",
)
@click.option(
    "--budget",
    default="30%",
    show_default=True,
    help="Parameters that the expansion may add: a share of the base's such as 30%, or a number such as 200M.",
)
@click.option(
    "--score",
    type=click.Choice(["relative-norm", "effective-rank"]),
    default="relative-norm",
    show_default=True,
    help="What layers are ordered by.",
)
@expansion_options
@pilot_options
@click.option("-o", "--output", type=FILE, help="Write the ranking as JSON.")
@click.option("--plot", type=FILE, help="Draw scores of layers and matrices as PNG.")
@click.option("--details", is_flag=True, help="Show the scores of each matrix too.")
@click.option("--revision", help="Branch, tag or commit of a Hub repository.")
@click.option("--device", default="auto", show_default=True, help="Where to run: auto, cpu, cuda, ...")
@click.option(
    "--trust-remote-code", "--trust_remote_code", is_flag=True, help="Let a custom tokenizer run its own code."
)
@output_options
def rank_layers_command(
    model: str,
    data: tuple[Path, ...],
    old: tuple[Path, ...],
    output: Path | None,
    plot: Path | None,
    details: bool,
    out: Output,
    **options: Any,
) -> None:
    """Rank the layers of MODEL, a base model, by what a short training run changes in them.

    A pilot trains on --data for a few steps and is thrown away; MODEL is only read. Layers are ranked by the relative
    norm of their change and by its effective rank, and those that a parameter budget pays for are proposed for
    --layers of expand. With --old, those in which W12, which writes into the base stream, is worth the drift that it
    causes are proposed too, for --collaborative-layers; the layers below them are the preserved depth, L_fp.

    \b
    Example: scale-surgery rank-layers MODEL --data domain.jsonl --budget 20%
    W12 too: scale-surgery rank-layers MODEL --data domain.jsonl --old general.txt
    """
    from scale_surgery.checkpoint.staging import check_output_files, write_json
    from scale_surgery.planning.request import Request
    from scale_surgery.running.options import RunOptions
    from scale_surgery.show.figure_rank_layers import plot_ranking
    from scale_surgery.show.tables_rank_layers import render_ranking
    from scale_surgery.training.pilot_settings import PilotSettings
    from scale_surgery.training.rank_layers import rank_layers
    from scale_surgery.training.ranking import RankingRequest

    check_output_files([output, plot], [model, *data, *old])
    pilot, wanted = (
        {name: value for name in names if (value := options.pop(name)) is not None} for names in (PILOT, EXPANSION)
    )
    if old and "collaborative_layers" in METHODS[wanted.get("method", DEFAULT_METHOD)].options:
        wanted = {"variant": "adapt"} | wanted
    expansion = Request(**{"layers": "all"} | wanted)
    request = RankingRequest(expansion, options.pop("budget"), options.pop("score"))
    run = take(RunOptions, options)
    result = rank_layers(model, data, PilotSettings(**pilot), request, old=old, run=run, track=out.track, **options)
    for warning in result.warnings:
        out.warn(warning)
    out.show(result, render_ranking(result, details=details))
    if output is not None:
        write_json(output, result.to_json())
        out.say(f"\nwritten to {output}")
    if plot is not None:
        plot_ranking(result, plot)
        out.say(f"\ndrawn to {plot}")
