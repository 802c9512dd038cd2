"""The command evaluate: parse, call one function, hand its result to the console."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scale_surgery.cli.headings import Headed
from scale_surgery.cli.options import (
    OLD_HELP,
    TEXTS,
    as_list,
    options_from,
    output_options,
    reading_options,
    take_fields,
)
from scale_surgery.cli.outputs import PICTURES, as_result, files_option, pictures, write_files
from scale_surgery.evidence.evaluate_settings import EvaluationSettings
from scale_surgery.text.instructions import SHIPPED
from scale_surgery.text.sources import NO_OLD_TEXT, paths_of

if TYPE_CHECKING:
    from scale_surgery.show.console import Output


def _as_numbers(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[float, ...] | None:
    """Parse comma-separated numbers."""
    try:
        return None if text is None else tuple(map(float, as_list(context, parameter, text)))
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no list of numbers, such as 0,0.5,1.") from error


@click.command(name="evaluate", cls=Headed, first=("old", "new", "strengths", "probes_file", "outputs"))
@click.argument("models", nargs=-1, required=True)
@click.option("--old", multiple=True, type=TEXTS, help=OLD_HELP)
@click.option("--new", multiple=True, type=TEXTS, help="New text, to measure learning. Can be repeated.")
@click.option(
    "--strength",
    "strengths",
    callback=_as_numbers,
    metavar="S,...",
    help="Measure each expansion also at these strengths, from 0 (the base) to 1 (what was learned), such as "
    "0,0.25,0.5,0.75,1. merge --strength writes one.",
)
@options_from(
    EvaluationSettings,
    "probes_file",
    "instructions",
    "max_new_tokens",
    "run_python",
    "python_seconds",
    "max_forgetting",
)
@reading_options("MODELS")
@files_option(
    ".json",
    *PICTURES,
    help="Write the numbers as .json, or plot old loss against new loss as .png or .svg, one point for each model.",
)
@click.option("--revision", help="Branch, tag or commit of Hub repositories.")
@output_options
def evaluate_command(
    models: tuple[str, ...],
    old: tuple[Path, ...],
    new: tuple[Path, ...],
    outputs: tuple[Path, ...],
    out: Output,
    **options: Any,
) -> None:
    """Measure forgetting and learning of MODELS: loss, perplexity and first-token accuracy on old and new text.

    For an expanded model, its base and the model with its expansion disabled are measured too. Texts have the formats
    of train: text files, JSONL, folders saved by the library datasets. In a question, only the answer is scored.

    \b
    Example: scale-surgery evaluate EXPANDED --old general.txt --new domain.jsonl
             scale-surgery evaluate EXPANDED --old FILE --strength 0,0.5,1
             scale-surgery evaluate EXPANDED --probes FILE --max-forgetting 0.02
             scale-surgery evaluate EXPANDED --instructions shipped
    On several GPUs: accelerate launch -m scale_surgery evaluate FOLDER --old FILE
    """
    from scale_surgery.checkpoint.staging import check_output_files
    from scale_surgery.evidence.evaluate import evaluate
    from scale_surgery.running.options import RunOptions
    from scale_surgery.show.commands import after_evaluation
    from scale_surgery.show.figure_plane import plot_plane
    from scale_surgery.show.tables import render_evaluation

    settings = take_fields(EvaluationSettings, options)
    if not (old or new or settings.probes_file or settings.instructions):
        missing = "--old, --new, --probes and --instructions are missing, give at least one of them"
        raise click.UsageError(f"{missing}. {NO_OLD_TEXT}")
    if not (old and new) and any(file.suffix.lower() in PICTURES for file in outputs):
        raise click.UsageError("A picture needs --old and --new: the plane has an axis for each.")
    usual = EvaluationSettings.python_seconds
    unread = {
        "--run-python": settings.run_python and not settings.probes_file,
        "--python-seconds": settings.python_seconds != usual and not settings.probes_file,
        "--max-new-tokens": settings.max_new_tokens is not None and not (settings.probes_file or settings.instructions),
    }
    if names := [option for option, is_unread in unread.items() if is_unread]:
        raise click.UsageError(f"{', '.join(names)}: nothing reads this without --probes or --instructions.")
    probes = [] if settings.probes_file is None else [settings.probes_file]
    asked = [] if settings.instructions in (None, SHIPPED) else [settings.instructions]
    check_output_files(outputs, [*models, *paths_of([*old, *new, *asked]), *probes])
    run = take_fields(RunOptions, options)
    result = evaluate(models, old, new, settings=settings, run=run, track=out.track, **options)
    out.show(result, render_evaluation(result))
    drawn = pictures(lambda file: plot_plane(result, file))
    write_files(outputs, {".json": as_result(result), **drawn}, out)
    out.suggest(after_evaluation(result, models))
    sys.exit(0 if result.limit is None or result.limit.holds else 1)
