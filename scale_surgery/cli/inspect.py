"""The command inspect: parse, call one function, hand its result to the console."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from scale_surgery.cli.headings import Headed
from scale_surgery.cli.options import BASE_CODE, model_options, output_options, run_options, take_fields

if TYPE_CHECKING:
    from scale_surgery.show.console import Output


@click.command(name="inspect", cls=Headed)
@model_options
@run_options(code=BASE_CODE)
@output_options
def inspect_command(model: str, revision: str | None, out: Output, **options: Any) -> None:
    """Describe MODEL: architecture, sizes, parameters and expansions.

    No weights are read, except a head that is stored although config.json ties it.

    \b
    Example: scale-surgery inspect meta-llama/Llama-3.2-1B
    """
    from scale_surgery.command_lines import changed_options, of_revision
    from scale_surgery.evidence.inspect import inspect
    from scale_surgery.running.options import RunOptions
    from scale_surgery.show.tables import render_inspection

    run = take_fields(RunOptions, options)
    inspection = inspect(model, revision=revision, run=run)
    passed_on = [*of_revision(revision), *changed_options(run, RunOptions())]
    out.show(inspection, render_inspection(inspection, model, passed_on))
