"""The command compare: parse, call one function, hand its result to the console."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scale_surgery.cli.headings import Headed
from scale_surgery.cli.options import BASE_CODE, OLD_HELP, TEXTS, options_from, output_options, run_options, take_fields
from scale_surgery.cli.outputs import OUTPUT_FOLDER
from scale_surgery.comparing.settings import CompareSettings

if TYPE_CHECKING:
    from scale_surgery.comparing.comparison import Comparison, Forecast, Refused, Row
    from scale_surgery.show.console import Output


@click.command(name="compare", cls=Headed, first=("data", "old", "output", "methods", "tokens"))
@click.argument("model")
@click.option("--data", multiple=True, required=True, type=TEXTS, help="Text to learn. Can be repeated.")
@click.option("--old", multiple=True, required=True, type=TEXTS, help=OLD_HELP)
@click.option("-o", "--output", required=True, type=OUTPUT_FOLDER, help="Folder of the comparison.")
@options_from(CompareSettings)
@click.option("--no-full", is_flag=True, help="Leave full fine-tuning out, which needs most memory.")
@click.option("--overwrite", is_flag=True, help="Replace the comparison in an existing folder.")
@click.option("--revision", help="Branch, tag or commit of a Hub repository.")
@run_options("device", code=BASE_CODE)
@output_options
def compare_command(
    model: str,
    data: tuple[Path, ...],
    old: tuple[Path, ...],
    output: Path,
    no_full: bool,
    overwrite: bool,
    revision: str | None,
    out: Output,
    **options: Any,
) -> None:
    """Compare methods that teach MODEL the text of --data: what each learns, forgets and costs.

    Each method learns the same number of tokens. Methods stay close to MODEL on text that it sampled. Learning rates
    are tried on a part of the tokens. The result is compare.html in the output folder: a figure, a table, and a
    sentence on the method to take. PEFT must be installed for lora and osf.

    The same command, without --overwrite, resumes an interrupted comparison.

    \b
    Example: scale-surgery compare MODEL --data new.jsonl --old old.txt -o OUT
             scale-surgery compare MODEL --data FILE --old FILE -o OUT \\
                 --methods lora,adapt,grow --tokens 1000000
    """
    from scale_surgery.comparing.compare import PAGE, CompareStart, compare
    from scale_surgery.comparing.tables import render_comparison, render_forecast
    from scale_surgery.running.options import RunOptions
    from scale_surgery.show.layout import sentence

    settings = take_fields(CompareSettings, options)
    if no_full:
        settings = CompareSettings(**{**vars(settings), "methods": tuple(m for m in settings.methods if m != "full")})

    def ends(entry: Row | Refused, comparison: Comparison) -> None:
        left = len(list(comparison.left))
        out.say(sentence(f"{entry.method} is done, {left} left"))

    def forecast(forecast: Forecast) -> None:
        out.say(render_forecast(forecast))

    done = compare(
        model,
        data,
        old,
        output,
        settings,
        start=CompareStart(revision, overwrite, forecast, ends),
        run=take_fields(RunOptions, options),
        track=out.track,
    )
    out.show(done, render_comparison(done))
    out.say(sentence(f"The page: {output / PAGE}", "dim"))
    sys.exit(0 if done.rows else 1)
