"""The command inspect: parse, call one function, hand its result to the console."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from scale_surgery.cli.options import model_options, output_options

if TYPE_CHECKING:
    from scale_surgery.show.console import Output


@click.command(name="inspect")
@model_options
@output_options
def inspect_command(model: str, revision: str | None, out: Output) -> None:
    """Describe MODEL: architecture, sizes, parameters, and what an expansion added. No weights are read.

    \b
    Example: scale-surgery inspect meta-llama/Llama-3.2-1B
    """
    from scale_surgery.deriving.inspect import inspect
    from scale_surgery.show.tables import render_inspection

    found = inspect(model, revision=revision)
    out.show(found, render_inspection(found, model))
