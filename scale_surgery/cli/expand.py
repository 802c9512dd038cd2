"""The command expand: parse, call one function, hand its result to the console."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scale_surgery.cli.headings import Headed
from scale_surgery.cli.options import (
    BASE_CODE,
    FILE,
    model_options,
    output_options,
    overwrite_options,
    run_options,
    take_fields,
)
from scale_surgery.cli.outputs import OUTPUT_FOLDER
from scale_surgery.cli.plan import LEFT_OUT, make_request, paths_of_tokens, request_options
from scale_surgery.planning.new_tokens import TokenSource
from scale_surgery.running.options import RunOptions

if TYPE_CHECKING:
    from scale_surgery.show.console import Output


@click.command(name="expand", cls=Headed, first=("layers", "method", "variant", "ratio", "output"))
@model_options
@request_options
@click.option("-o", "--output", type=OUTPUT_FOLDER, help="Folder to write. Default: ./<name>-scale.")
@click.option(
    "--plan",
    "plan_file",
    type=FILE,
    help="Plan file to execute, written by plan -o. It replaces --layers and the other options of plan.",
)
@click.option("--dry-run", is_flag=True, help="Show the plan and write nothing, like the command plan.")
@overwrite_options
@run_options(
    "device",
    code=BASE_CODE,
    helps={"device": "Device of the SVD of base weights: cpu, cuda, ... auto uses a CUDA GPU if there is one."},
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
    """Widen chosen layers of MODEL with new tensors. Every pretrained tensor keeps its bytes.

    The output is a complete checkpoint folder: the base's tensors, the new tensors, and a record of both
    (surgery.json). plan --help explains W12, W21 and W22.

    \b
    Example: scale-surgery expand MODEL --layers last:4
    """
    from scale_surgery.checkpoint.sources import open_model
    from scale_surgery.checkpoint.staging import check_target
    from scale_surgery.deriving.planned import load_plan, make_plan
    from scale_surgery.show.commands import expand_command
    from scale_surgery.show.tables import render_expansion
    from scale_surgery.show.tables_plan import render_plan
    from scale_surgery.surgery.expand import default_output, expand

    # --dtype is the dtype of the new tensors, not of the run
    run = take_fields(RunOptions, options, "device", "trust_remote_code")
    tokens = take_fields(TokenSource, options)
    how = {name: options.pop(name) for name in ("base_weights", "overwrite")}
    request = make_request(options, tokens, model, revision, run, out)
    if (request is None) == (plan_file is None):
        raise click.UsageError("Give --layers or new tokens, or --plan with a saved plan, one of the two.")
    if request is not None:
        # its new tokens were tested when they were found
        source, checkpoint = open_model(model, revision)
        made = make_plan(checkpoint, request, name=source.name, revision=source.revision, run=run, track=out.track)
    elif plan_file is not None:
        made = load_plan(model, plan_file, revision=revision, run=run, track=out.track)
    if dry_run:
        out.show(made, render_plan(made))
        out.suggest(expand_command(model, made, tokens, revision, plan_file))
        return
    # check the target first, before the user reads a plan that cannot be written
    target = default_output(made) if output is None else output
    read = [Path(model), *paths_of_tokens(tokens), *filter(None, [plan_file])]
    check_target(target, [path for path in read if path.exists()], overwrite=how["overwrite"])
    out.say(render_plan(made))
    done = expand(
        model,
        made,
        target,
        revision=revision,
        **how,
        run=run,
        track=out.track,
    )
    if done.left_out:
        out.warn(LEFT_OUT.format(", ".join(done.left_out)))
    out.show(done, render_expansion(done))
