"""The command adopt: parse, call one function, hand its result to the console."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scale_surgery.cli.headings import Headed
from scale_surgery.cli.options import output_options, overwrite_options
from scale_surgery.cli.outputs import OUTPUT_FOLDER

if TYPE_CHECKING:
    from scale_surgery.show.console import Output


@click.command(name="adopt", cls=Headed)
@click.argument("saved")
@click.option("--expanded", required=True, help="Expanded model before training, a folder or a Hub id.")
@click.option("-o", "--output", type=OUTPUT_FOLDER, help="Folder to write. Default: ./<name>-adopted.")
@overwrite_options
@output_options
def adopt_command(saved: str, expanded: str, output: Path | None, out: Output, **options: Any) -> None:
    """Convert SAVED, a checkpoint by another trainer, to an expanded model. SAVED is a folder or a Hub id.

    Trainer, TRL, accelerate and plain loops save all tensors in their own shards, without surgery.json. adopt compares
    every base tensor of SAVED with the base model. If one differs, it names the tensor and writes nothing.

    \b
    Example: scale-surgery adopt SAVED --expanded EXPANDED -o OUT
    """
    from scale_surgery.show.tables_forms import render_adopted
    from scale_surgery.surgery.adopt import adopt

    done = adopt(saved, expanded, output, track=out.track, **options)
    out.show(done, render_adopted(done))
