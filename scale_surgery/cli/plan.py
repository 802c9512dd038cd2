"""The command plan: parse, call one function, hand its result to the console.

It also defines the options of a request, which `expand` shares.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scale_surgery.cli.headings import Headed
from scale_surgery.cli.options import (
    BASE_CODE,
    Command,
    add_options,
    given,
    model_options,
    options_from,
    output_options,
    run_options,
    set_option,
    take_fields,
)
from scale_surgery.cli.outputs import files_option, write_files
from scale_surgery.fields import fields_of
from scale_surgery.planning.new_tokens import TokenSource
from scale_surgery.planning.request import NO_LAYERS, Request
from scale_surgery.running.options import RunOptions

if TYPE_CHECKING:
    from scale_surgery.show.console import Output


def request_options(command: Command) -> Command:
    """Add the options of a request."""
    return add_options(command, [options_from(Request), options_from(TokenSource), set_option(Request)])


LEFT_OUT = "other weight formats, links out of the folder and logs are not copied: {}"


def paths_of_tokens(wanted: TokenSource) -> list[Path]:
    """Return the paths of all files that are read for new tokens."""
    from scale_surgery.text.sources import paths_of

    return [*map(Path, filter(None, [wanted.token_file])), *paths_of(wanted.token_texts)]


def make_request(
    options: dict[str, Any], wanted: TokenSource, model: str, revision: str | None, run: RunOptions, out: Output
) -> Request | None:
    """Return a request from command line options, or None if neither layers nor new tokens are given."""
    from scale_surgery.running.learned_tokens import ChosenTokens
    from scale_surgery.running.new_tokens import find_new_tokens
    from scale_surgery.show.tables import render_chosen_tokens

    tokens = find_new_tokens(model, wanted, revision=revision, run=run, track=out.track)
    settings = given(options)
    if isinstance(tokens, ChosenTokens):
        out.say(render_chosen_tokens(tokens))
        tokens = tokens.new_tokens
    if tokens is not None:
        return Request(**{"layers": NO_LAYERS, **settings}, new_tokens=tokens)
    if "layers" in settings:
        return Request(**settings)
    if settings:
        fields = fields_of(Request)
        raise click.UsageError(f"{', '.join(fields[name].typed for name in settings)} needs --layers.")
    return None


@click.command(name="plan", cls=Headed, first=("layers", "method", "variant", "ratio", "outputs"))
@model_options
@request_options
@files_option(".json", help="Write the plan to this .json file, for expand --plan.")
@click.option("--details", is_flag=True, help="List every new tensor.")
@run_options(code=BASE_CODE)
@output_options
def plan_command(
    model: str, revision: str | None, outputs: tuple[Path, ...], details: bool, out: Output, **options: Any
) -> None:
    """Show the plan of expand for MODEL: every new tensor and its cost.

    No weights are read, except a head that is stored although config.json ties it. None are downloaded.

    An expanded linear layer is a block matrix. Its base matrix W stays frozen. W21 maps the base's features to the new
    features, W22 maps new features to new features, and W12 maps the new features back to the base's.

    \b
    Example: scale-surgery plan MODEL --layers last:4 --variant adapt -o plan.json
    """
    from scale_surgery.checkpoint.sources import open_model
    from scale_surgery.checkpoint.staging import check_output_files
    from scale_surgery.deriving.planned import make_plan
    from scale_surgery.planning.saved import save_plan
    from scale_surgery.show.commands import expand_command
    from scale_surgery.show.tables_plan import render_plan

    run, tokens = take_fields(RunOptions, options, "trust_remote_code"), take_fields(TokenSource, options)
    check_output_files(outputs, [model, *paths_of_tokens(tokens)])
    request = make_request(options, tokens, model, revision, run, out)
    if request is None:
        raise click.UsageError("--layers is missing, for example --layers last:4.")
    source, checkpoint = open_model(model, revision)
    made = make_plan(checkpoint, request, name=source.name, revision=source.revision, run=run, track=out.track)
    if checkpoint.left_out:
        out.warn(LEFT_OUT.format(", ".join(checkpoint.left_out)))
    out.show(made, render_plan(made, details=details))
    write_files(outputs, {".json": lambda file: save_plan(made, file)}, out)
    out.suggest(expand_command(model, made, tokens, revision, next(iter(outputs), None)))
