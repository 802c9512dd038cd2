"""The command hold-out: parse, call one function, hand its result to the console."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scale_surgery.cli.headings import Headed
from scale_surgery.cli.options import options_from, output_options, set_option, take_fields
from scale_surgery.cli.outputs import OUTPUT_FOLDER
from scale_surgery.learning.hold_out import HoldOutSettings

if TYPE_CHECKING:
    from scale_surgery.show.console import Output


@click.command(name="hold-out", cls=Headed)
@click.argument("files", nargs=-1, required=True)
@click.option("-o", "--output", type=OUTPUT_FOLDER, required=True, help="Folder to write.")
@options_from(HoldOutSettings)
@set_option(HoldOutSettings)
@output_options
def hold_out_command(files: tuple[str, ...], output: Path, out: Output, **options: Any) -> None:
    """Split FILES into learn.jsonl, calibrate.jsonl for the router, and measure.jsonl for measurements.

    A hash of the text of a document chooses its part. So equal documents go to the same part, and a second run gives
    the same parts. With fewer than 20 documents, the ends of long documents are held out.

    \b
    Example: scale-surgery hold-out domain.jsonl -o texts
    """
    from scale_surgery.learning.hold_out import hold_out
    from scale_surgery.learning.tables import render_held_out

    done = hold_out(files, output, take_fields(HoldOutSettings, options), track=out.track)
    out.show(done, render_held_out(done))
