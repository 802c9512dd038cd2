"""The command `route-report`: parse, call one function, hand its result to the console."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scale_surgery.cli.headings import Headed
from scale_surgery.cli.options import TEXTS, output_options, reading_options, take_fields
from scale_surgery.cli.outputs import as_result, files_option, write_files

if TYPE_CHECKING:
    from scale_surgery.show.console import Output


@click.command(name="route-report", cls=Headed)
@click.argument("model")
@click.option("--text", "texts", multiple=True, required=True, type=TEXTS, help="Text to route. Can be repeated.")
@files_option(
    ".html",
    ".jsonl",
    ".json",
    help="Write a page with tokens in colour as .html, one line of JSON for each token as .jsonl, or all as .json.",
)
@reading_options("MODEL")
@click.option("--revision", help="Branch, tag or commit of a Hub repository.")
@output_options
def route_report_command(
    model: str, texts: tuple[Path, ...], outputs: tuple[Path, ...], out: Output, **options: Any
) -> None:
    """Show the path of each token of a text in MODEL, and how well each path predicted it.

    MODEL is an output folder of route-export or compose, or a Hub id. Texts have the formats of train: text files,
    JSONL, folders saved by the library datasets.

    \b
    Example: scale-surgery route-report ROUTED --text notes.txt -o report.html
    """
    from scale_surgery.checkpoint.staging import check_output_files
    from scale_surgery.routing.report import route_report, write_tokens
    from scale_surgery.running.options import RunOptions
    from scale_surgery.show.pages.routing import write_page
    from scale_surgery.show.tables_route_report import render_route_report
    from scale_surgery.text.sources import paths_of

    check_output_files(outputs, [model, *paths_of(texts)])
    report = route_report(model, texts, run=take_fields(RunOptions, options), track=out.track, **options)
    out.show(report, render_route_report(report))
    page, lines = partial(write_page, report), partial(write_tokens, report)
    write_files(outputs, {".html": page, ".jsonl": lines, ".json": as_result(report)}, out)
