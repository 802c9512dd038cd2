"""The command merge: parse, call one function, hand its result to the console."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from scale_surgery.cli.headings import Headed
from scale_surgery.cli.options import (
    FOLDER,
    options_from,
    output_options,
    overwrite_option,
    running_options,
    take_fields,
)
from scale_surgery.cli.outputs import OUTPUT_FOLDER
from scale_surgery.surgery.merge import MergedForm, MergedPart

if TYPE_CHECKING:
    from scale_surgery.show.console import Output


@click.command(name="merge", cls=Headed)
@click.argument("expanded", type=FOLDER)
@click.option("-o", "--output", type=OUTPUT_FOLDER, required=True, help="Folder to write.")
@click.option(
    "--to",
    type=click.Choice(get_args(MergedForm)),
    default="fused",
    show_default=True,
    help="Form of the output. fused: one matrix for each linear layer, for faster inference and for vLLM, with its own "
    "model code. stock: a plain checkpoint of the base's architecture, if the hidden size was not widened. blocks: "
    "split a fused model into its blocks again, byte for byte.",
)
@options_from(MergedPart)
@running_options
@overwrite_option
@output_options
def merge_command(expanded: Path, output: Path, to: Any, out: Output, **options: Any) -> None:
    """Merge the blocks of EXPANDED into one matrix for each linear layer, and measure the change of its logits.

    \b
    Example: scale-surgery merge EXPANDED -o FUSED
    Without remote code: scale-surgery merge EXPANDED -o STOCK --to stock
    Between base and learned: scale-surgery merge EXPANDED -o HALF --strength 0.5
    """
    from scale_surgery.running.options import Probes, RunOptions
    from scale_surgery.show.tables_forms import render_merged
    from scale_surgery.surgery.merge import merge

    part, probes = take_fields(MergedPart, options), take_fields(Probes, options)
    run = take_fields(RunOptions, options)
    done = merge(expanded, output, to, part=part, probes=probes, run=run, track=out.track, **options)
    out.show(done, render_merged(done))
