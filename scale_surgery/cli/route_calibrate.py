"""The command route-calibrate: parse, call one function, hand its result to the console."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scale_surgery.cli.options import FILE, FOLDER, TEXTS, output_options, reading_options, take

if TYPE_CHECKING:
    from scale_surgery.show.console import Output


@click.command(name="route-calibrate")
@click.argument("routed", type=FOLDER)
@click.option(
    "--old", multiple=True, required=True, type=TEXTS, help="Text that tells what the base knows, repeatable."
)
@click.option("--new", multiple=True, required=True, type=TEXTS, help="Text with what was to be learned, repeatable.")
@click.option(
    "--most-forgetting",
    type=click.FloatRange(min=0),
    default=0.02,
    show_default=True,
    help="Nats per token of old text that may be lost against the base.",
)
@click.option("--write", is_flag=True, help="Set the best setting in ROUTED.")
@click.option("--plot", type=FILE, help="Draw forgetting against learning, a point for each setting, as PNG.")
@click.option("--details", is_flag=True, help="List every setting, not only those worth a choice.")
@reading_options("ROUTED")
@output_options
def route_calibrate_command(
    routed: Path, old: tuple[Path, ...], new: tuple[Path, ...], details: bool, out: Output, **options: Any
) -> None:
    """Find the best numbers for the router of ROUTED: a threshold, or a prior and a switch rate.

    Each text is read once; every setting follows from what both paths say of each token. Forgetting is the loss on
    old text minus the base's, learning the base's loss on new text minus the model's, in nats per token.

    The best setting is the one that learns most among those that forget at most --most-forgetting. Where none forgets
    so little, it is the one that forgets least. Of equal ones the present setting wins, then the default. Choose on
    other text than you report on.

    \b
    Example: scale-surgery route-calibrate ROUTED --old a.txt --new b.jsonl --write
    """
    from scale_surgery.routing.calibrate import CalibrationSettings, route_calibrate
    from scale_surgery.running.options import RunOptions
    from scale_surgery.show.tables_calibrate import render_calibration

    run = take(RunOptions, options)
    settings = take(CalibrationSettings, options)
    result = route_calibrate(routed, old, new, settings, run=run, track=out.track, **options)
    out.show(result, render_calibration(result, details=details))
