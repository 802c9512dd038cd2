"""The command serve: parse, and call one function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from scale_surgery.cli.headings import Headed
from scale_surgery.cli.options import code_of, model_options, options_from, output_options, run_options, take_fields
from scale_surgery.talking.serve import Address

if TYPE_CHECKING:
    from scale_surgery.show.console import Output


@click.command(name="serve", cls=Headed)
@model_options
@options_from(Address)
@click.option(
    "--expansion",
    help="Answer requests to MODEL with this expansion of a composed folder, or with base. Default: all, weighted by "
    "the router. A request can also name its expansion.",
)
@run_options("device", "dtype", code=code_of("MODEL"))
@output_options
def serve_command(model: str, out: Output, **options: Any) -> None:
    """Serve MODEL with OpenAI's endpoints, by transformers' own server. Ctrl-C stops it.

    MODEL is stock, expanded, routed, composed or fused. The server needs pip install 'scale-surgery[serve]'.

    \b
    Example: scale-surgery serve ROUTED --port 8000
    """
    from scale_surgery.running.options import RunOptions
    from scale_surgery.show.tables_push import render_served
    from scale_surgery.talking.serve import serve

    address, run = take_fields(Address, options), take_fields(RunOptions, options)
    serve(model, address, run=run, ready=lambda served: out.show(served, render_served(served)), **options)
