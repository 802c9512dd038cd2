"""The command strip: parse, call one function, hand its result to the console."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scale_surgery.cli.headings import Headed
from scale_surgery.cli.options import FOLDER, output_options, overwrite_options
from scale_surgery.cli.outputs import OUTPUT_FOLDER

if TYPE_CHECKING:
    from scale_surgery.show.console import Output


@click.command(name="strip", cls=Headed)
@click.argument("expanded", type=FOLDER)
@click.option("-o", "--output", type=OUTPUT_FOLDER, required=True, help="Folder to write.")
@overwrite_options
@output_options
def strip_command(expanded: Path, output: Path, base_weights: Any, overwrite: bool, out: Output) -> None:
    """Remove all expansions from EXPANDED. The output is its base model, every file byte for byte.

    \b
    Example: scale-surgery strip EXPANDED -o BASE
    """
    from scale_surgery.show.tables import render_stripped
    from scale_surgery.surgery.strip import strip

    done = strip(expanded, output, base_weights=base_weights, overwrite=overwrite, track=out.track)
    out.show(done, render_stripped(done))
