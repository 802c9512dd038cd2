"""The commands plan and expand: parse, call one function, hand its result to the console."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scale_surgery.cli.options import (
    FILE,
    FOLDER,
    Command,
    add_options,
    model_options,
    output_options,
    overwrite_options,
    take,
)
from scale_surgery.planning.methods import METHODS, variants

if TYPE_CHECKING:
    from scale_surgery.planning.request import Request
    from scale_surgery.show.console import Output


def request_options(command: Command) -> Command:
    """Add what makes a `Request`; defaults stand in the dataclass."""
    inits = click.Choice(["svd", "random", "zero"])
    options = [
        click.option(
            "--layers", help="Layers to expand, zero-based, ends included: 20-31, 0,4,8, -1, last:4, every:4, all."
        ),
        click.option(
            "--method",
            type=click.Choice(list(METHODS)),
            help="scale: new blocks; grow: copies of the MLP; depth: copies of whole layers. Default: scale.",
        ),
        click.option(
            "--variant",
            type=click.Choice(variants()),
            help="What trains. Default: preserve (scale), grow-freeze (grow), depth (depth).",
        ),
        click.option("--copies", type=int, help="MLPs in a grown layer, the original included (grow). Default: 2."),
        click.option("--collaborative-layers", help="Layers with W12 (adapt). Default: all expanded layers."),
        click.option(
            "--collaborate", type=click.Choice(["attn", "ffn", "both"]), help="Where W12 stands (adapt). Default: attn."
        ),
        click.option("--ratio", type=float, help="Added width as a share of the base's. Default: 0.125."),
        click.option(
            "--up-width",
            type=int,
            help="Features added to the residual stream, a multiple of the head size. Default: from --ratio.",
        ),
        click.option("--up-kv-heads", type=int, help="Key/value heads added in each layer. Default: from --ratio."),
        click.option("--up-inner-width", type=int, help="Features added inside each MLP. Default: from --ratio."),
        click.option("--init-w21", type=inits, help="How W21 starts. Default: svd."),
        click.option("--init-w22", type=inits, help="How W22 starts. Default: zero."),
        click.option(
            "--init-embedding",
            type=click.Choice(["svd", "zero"]),
            help="How new embedding columns start. Default: svd.",
        ),
        click.option(
            "--svd",
            type=click.Choice(["exact", "fast"]),
            help="Eigenvectors in float64, or a randomized range finder. Default: fast.",
        ),
        click.option("--seed", type=int, help="Seed of everything random. Default: 0."),
        click.option(
            "--dtype",
            type=click.Choice(["float32", "float16", "bfloat16"]),
            help="Of new tensors. Default: as the tensor beside.",
        ),
    ]
    return add_options(command, options)


def make_request(options: dict[str, Any]) -> Request | None:
    """A request from command line options; None where no layers were given."""
    from scale_surgery.planning.request import Request

    given = {name: value for name, value in options.items() if value is not None}
    if "layers" not in given:
        if given:
            named = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise click.UsageError(f"{named} needs --layers.")
        return None
    return Request(**given)


@click.command(name="plan")
@model_options
@request_options
@click.option("-o", "--output", type=FILE, help="Write the plan as JSON, for expand --plan.")
@click.option("--details", is_flag=True, help="List every new tensor.")
@output_options
def plan_command(
    model: str, revision: str | None, output: Path | None, details: bool, out: Output, **options: Any
) -> None:
    """Show everything that expand would do to MODEL; no weight is read.

    \b
    Example: scale-surgery plan MODEL --layers 20-31 --variant adapt -o plan.json
    """
    from scale_surgery.checkpoint.staging import check_output_files
    from scale_surgery.planning.plan import plan
    from scale_surgery.planning.saved import save_plan
    from scale_surgery.show.tables_plan import render_plan

    request = make_request(options)
    if request is None:
        raise click.UsageError("--layers is missing, for example --layers last:4.")
    check_output_files([output], [model])
    made = plan(model, request, revision=revision)
    if output is not None:
        save_plan(made, output)
    out.show(made, render_plan(made, details=details))
    if output is not None:
        out.say(f"\nwritten to {output}; execute it with scale-surgery expand {model} --plan {output}")


@click.command(name="expand")
@model_options
@request_options
@click.option("-o", "--output", type=FOLDER, help="Folder to be. Default: ./<name>-scale.")
@click.option("--plan", "plan_file", type=FILE, help="Execute exactly this saved plan.")
@click.option("--dry-run", is_flag=True, help="Show the plan and stop; the same as the command plan.")
@overwrite_options
@click.option("--device", default="cpu", show_default=True, help="Where decompositions are computed: cpu, cuda, ...")
@click.option(
    "--trust-remote-code", "--trust_remote_code", is_flag=True, help="Let a custom tokenizer run its own code."
)
@output_options
def expand_command(
    model: str,
    revision: str | None,
    output: Path | None,
    plan_file: Path | None,
    dry_run: bool,
    out: Output,
    **options: Any,
) -> None:
    """Widen chosen layers of MODEL; every pretrained tensor keeps its bytes.

    \b
    Example: scale-surgery expand MODEL --layers 20-31
    """
    from scale_surgery.planning.plan import plan
    from scale_surgery.planning.saved import load_plan
    from scale_surgery.running.options import RunOptions
    from scale_surgery.show.tables import render_expansion
    from scale_surgery.show.tables_plan import render_plan
    from scale_surgery.surgery.expand import expand

    run = take(RunOptions, {name: options.pop(name) for name in ("device", "trust_remote_code")})
    how = {name: options.pop(name) for name in ("base_weights", "overwrite")}
    request = make_request(options)
    if (request is None) == (plan_file is None):
        raise click.UsageError("Give --layers, or --plan with a saved plan, one of the two.")
    if request is not None:
        made = plan(model, request, revision=revision)
    elif plan_file is not None:
        made = load_plan(model, plan_file, revision=revision)
    if dry_run:
        out.show(made, render_plan(made))
        return
    out.say(render_plan(made))
    done = expand(
        model,
        made,
        output,
        revision=revision,
        **how,
        run=run,
        track=out.track,
    )
    if done.left_out:
        out.warn(f"weights in other formats are not taken along: {', '.join(done.left_out)}")
    out.show(done, render_expansion(done))
