"""The command report: parse, call one function, hand its result to the console."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scale_surgery.cli.headings import Headed
from scale_surgery.cli.options import FOLDER, TEXTS, code_of, output_options, run_options, take_fields
from scale_surgery.cli.outputs import as_result, files_option, write_files

if TYPE_CHECKING:
    from scale_surgery.show.console import Output


@click.command(name="report", cls=Headed)
@click.argument("expanded", type=FOLDER)
@click.option(
    "--text",
    "texts",
    multiple=True,
    type=TEXTS,
    help="Text to run the model on. Can be repeated. Default: the prompts of verify.",
)
@click.option("--name", help="Expansion to report on, if there are several.")
@click.option("--files-only", is_flag=True, help="Read tensors only and run no model. Hidden states are left out.")
@files_option(".html", ".json", help="Write a page with plots and every number as .html, or the numbers as .json.")
@click.option("--details", is_flag=True, help="List every tensor.")
@click.option(
    "--sequence-length",
    type=click.IntRange(min=2),
    help="Tokens in one window. Default: the context length of EXPANDED, at most 1024.",
)
@run_options("device", code=code_of("EXPANDED"))
@output_options
def report_command(
    expanded: Path, texts: tuple[Path, ...], outputs: tuple[Path, ...], details: bool, out: Output, **options: Any
) -> None:
    """Show the effect of training on EXPANDED: norms of new tensors, and drift of hidden states.

    Norms are Frobenius norms. Drift is the largest absolute difference between the model's base stream and the hidden
    states of the base model. The cosine between the two is a mean over tokens. Texts have the formats of train: text
    files, JSONL, folders saved by the library datasets.

    \b
    Example: scale-surgery report EXPANDED --text general.txt -o report.html
    """
    from scale_surgery.checkpoint.staging import check_output_files
    from scale_surgery.evidence.report import report
    from scale_surgery.running.options import RunOptions
    from scale_surgery.show.commands import after_report
    from scale_surgery.show.pages.report import write_page
    from scale_surgery.show.tables_report import render_report
    from scale_surgery.text.sources import paths_of

    check_output_files(outputs, [expanded, *paths_of(texts)])
    training_report = report(expanded, texts, run=take_fields(RunOptions, options), track=out.track, **options)
    out.show(training_report, render_report(training_report, details=details))
    write_files(outputs, {".html": partial(write_page, training_report), ".json": as_result(training_report)}, out)
    out.suggest(after_report(training_report, expanded, options["name"]))
