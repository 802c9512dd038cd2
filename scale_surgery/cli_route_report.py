"""The command `route-report`: parse, call one function, hand its result to the console."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scale_surgery.options import FILE, TEXTS, output_options

if TYPE_CHECKING:
    from scale_surgery.console import Output


@click.command(name="route-report")
@click.argument("model")
@click.option("--text", "texts", multiple=True, required=True, type=TEXTS, help="Text to look at, repeatable.")
@click.option("-o", "--output", type=FILE, help="Write a page: tokens in colour, the numbers of each on hover. HTML.")
@click.option("--jsonl", type=FILE, help="Write a line of JSON for each token.")
@click.option(
    "--sequence-length",
    type=click.IntRange(min=2),
    help="Most tokens that are read at once. Default: the context of MODEL, at most 1024.",
)
@click.option(
    "--step",
    type=click.IntRange(min=1),
    help="Tokens from one window of a longer text to the next. Default: half of --sequence-length.",
)
@click.option(
    "--batch-size", type=click.IntRange(min=1), default=8, show_default=True, help="Windows in one forward pass."
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    help="Cast weights to it. Default: as they are stored.",
)
@click.option("--device", default="cpu", show_default=True, help="Where the model runs: cpu, cuda, ...")
@click.option("--revision", help="Branch, tag or commit of a Hub repository.")
@click.option(
    "--trust-remote-code",
    "--trust_remote_code",
    is_flag=True,
    help="Run the code in MODEL instead of this program's own.",
)
@output_options
def route_report_command(
    model: str, texts: tuple[Path, ...], output: Path | None, jsonl: Path | None, out: Output, **options: Any
) -> None:
    """Show which path of the routed MODEL each token of a text came from, and what both paths made of it.

    Texts are as for train: text files, JSONL, folders that the library datasets saved.

    \b
    Example: scale-surgery route-report ROUTED --text notes.txt -o report.html
    """
    from scale_surgery.route_page import write_page
    from scale_surgery.route_report import check_outputs, route_report, write_jsonl
    from scale_surgery.route_report_tables import render_route_report

    written = [(file, write) for file, write in ((output, write_page), (jsonl, write_jsonl)) if file is not None]
    check_outputs(texts, [file for file, _ in written])
    report = route_report(model, texts, track=out.track, **options)
    out.show(report, render_route_report(report))
    for file, write in written:
        write(report, file)
    if written:
        out.say(f"\nwritten to {' and '.join(str(file) for file, _ in written)}")
