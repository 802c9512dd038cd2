"""The command apply: parse, call one function, hand its result to the console."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scale_surgery.cli.headings import Headed
from scale_surgery.cli.options import TOKENIZER_CODE, output_options, overwrite_options, run_options, take_fields
from scale_surgery.cli.outputs import OUTPUT_FOLDER

if TYPE_CHECKING:
    from scale_surgery.show.console import Output


@click.command(name="apply", cls=Headed)
@click.argument("extract")
@click.option(
    "--base",
    help="Base model, a folder or a Hub id. Default: the Hub repository and commit in EXTRACT.",
)
@click.option("--revision", help="Branch, tag or commit of the base's Hub repository. Default: the commit in EXTRACT.")
@click.option("--extract-revision", help="Branch, tag or commit of EXTRACT's Hub repository. Default: its main branch.")
@click.option("-o", "--output", type=OUTPUT_FOLDER, required=True, help="Folder to write.")
@overwrite_options
@run_options(code=TOKENIZER_CODE)
@output_options
def apply_command(extract: str, base: str | None, output: Path, out: Output, **options: Any) -> None:
    """Add the new tensors of EXTRACT, a folder or a Hub id, to its base model.

    The output equals the folder that was extracted, byte for byte.

    \b
    Example: scale-surgery apply EXTRACT --base MODEL -o EXPANDED
    """
    from scale_surgery.running.options import RunOptions
    from scale_surgery.show.tables_forms import render_applied
    from scale_surgery.surgery.apply import GivenBase, apply

    given = GivenBase(base, options.pop("revision"))
    done = apply(extract, output, given, run=take_fields(RunOptions, options), track=out.track, **options)
    out.show(done, render_applied(done))
