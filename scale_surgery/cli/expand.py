"""The commands plan and expand: parse, call one function, hand its result to the console."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scale_surgery.cli.options import (
    FILE,
    FOLDER,
    TOKENIZER_CODE,
    given,
    model_options,
    named,
    options_from,
    output_options,
    overwrite_options,
    run_options,
    take,
)
from scale_surgery.planning.request import Request

if TYPE_CHECKING:
    from scale_surgery.show.console import Output


request_options = options_from(
    Request,
    *("layers", "method", "variant", "copies", "collaborative_layers", "collaborate"),
    *("ratio", "up_width", "up_kv_heads", "up_inner_width"),
    *("init_w21", "init_w22", "init_embedding", "svd", "seed", "dtype"),
)


def make_request(options: dict[str, Any]) -> Request | None:
    """A request from command line options; None where no layers were given."""
    said = given(options)
    if "layers" in said:
        return Request(**said)
    if said:
        raise click.UsageError(f"{named(said)} needs --layers.")
    return None


@click.command(name="plan")
@model_options
@request_options
@click.option("-o", "--output", type=FILE, help="Write the plan to this JSON file, for expand --plan.")
@click.option("--details", is_flag=True, help="List every new tensor.")
@output_options
def plan_command(
    model: str, revision: str | None, output: Path | None, details: bool, out: Output, **options: Any
) -> None:
    """Show what expand would do to MODEL: every new tensor, and what it costs. No weights are read or downloaded.

    An expanded linear layer is a block matrix. Its base matrix stays frozen. W21 reads the base's features into the new
    ones, W22 connects the new features, and W12 writes from the new features back into the base's.

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
@click.option("-o", "--output", type=FOLDER, help="Folder to write. Default: ./<name>-scale.")
@click.option(
    "--plan",
    "plan_file",
    type=FILE,
    help="Carry out a plan that the command plan saved, in place of --layers and the rest.",
)
@click.option("--dry-run", is_flag=True, help="Show the plan and write nothing, as the command plan does.")
@overwrite_options
@run_options(
    "device",
    code=TOKENIZER_CODE,
    helps={"device": "Where singular value decompositions are computed: cpu, cuda, ..."},
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
    """Widen chosen layers of MODEL with new tensors; every pretrained tensor keeps its bytes.

    The output is a checkpoint folder of its own: the base's tensors, the new ones, and a record of both (surgery.json).
    See plan --help for W12, W21 and W22.

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
