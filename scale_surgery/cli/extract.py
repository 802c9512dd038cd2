"""The command extract: parse, call one function, hand its result to the console."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from scale_surgery.cli.headings import Headed
from scale_surgery.cli.options import FOLDER, output_options, overwrite_option
from scale_surgery.cli.outputs import OUTPUT_FOLDER

if TYPE_CHECKING:
    from scale_surgery.show.console import Output


@click.command(name="extract", cls=Headed)
@click.argument("expanded", type=FOLDER)
@click.option("-o", "--output", type=OUTPUT_FOLDER, required=True, help="Folder to write.")
@click.option("--name", help="Expansion to extract, if there are several.")
@overwrite_option
@output_options
def extract_command(expanded: Path, output: Path, name: str | None, overwrite: bool, out: Output) -> None:
    """Write the new tensors of EXPANDED without its base: a small folder, like an adapter. It records the base's name.

    apply adds an extract to its base again. compose combines several extracts on one base.

    \b
    Example: scale-surgery extract EXPANDED -o EXTRACT
    """
    from scale_surgery.show.tables_forms import render_extracted
    from scale_surgery.surgery.extract import extract

    done = extract(expanded, output, name=name, overwrite=overwrite, track=out.track)
    out.show(done, render_extracted(done))
