"""The command route-calibrate: parse, call one function, hand its result to the console."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scale_surgery.cli.headings import Headed
from scale_surgery.cli.options import (
    FOLDER,
    OLD_HELP,
    TEXTS,
    options_from,
    output_options,
    reading_options,
    take_fields,
)
from scale_surgery.cli.outputs import PICTURES, OutputFile
from scale_surgery.routing.choice import CalibrationSettings

if TYPE_CHECKING:
    from scale_surgery.show.console import Output


@click.command(name="route-calibrate", cls=Headed, first=("old", "new", "most_forgetting", "write", "plot"))
@click.argument("routed", type=FOLDER)
@click.option("--old", multiple=True, required=True, type=TEXTS, help=OLD_HELP)
@click.option("--new", multiple=True, required=True, type=TEXTS, help="New text, to measure learning. Can be repeated.")
@options_from(CalibrationSettings, "most_forgetting", "bound", "write")
@click.option(
    *("-o", "--output", "plot"),
    type=OutputFile(*PICTURES),
    help="Plot forgetting against learning as .png or .svg, one point for each setting. Default: none.",
)
@click.option("--details", is_flag=True, help="List every setting, not only the best ones.")
@reading_options("ROUTED")
@output_options
def route_calibrate_command(
    routed: Path, old: tuple[Path, ...], new: tuple[Path, ...], details: bool, out: Output, **options: Any
) -> None:
    """Find the best setting for the router of ROUTED: a threshold, or a prior and a switch rate.

    ROUTED is an output folder of route-export or compose. The prior of a composed folder has one weight for each path.

    Each text is read once, and every setting is computed from the logits of all paths. Forgetting is the loss on old
    text minus the base's. Learning is the base's loss on new text minus the model's. Both are in nats per token.

    Settings are allowed if their bound is no looser than the current one, per text and per token, or than --bound. Of
    the allowed settings that forget at most --most-forgetting, on old text and on the first 8 tokens of old texts, the
    best learns most; if every one forgets more, the one that forgets least is shown, and --write changes nothing. A
    current setting that keeps these limits is replaced only for a gain above twice its standard error over texts.

    Measure the result on other text than the calibration text.

    \b
    Example: scale-surgery route-calibrate ROUTED --old a.txt --new b.txt --write
    """
    from scale_surgery.routing.calibrate import route_calibrate
    from scale_surgery.running.options import RunOptions
    from scale_surgery.show.tables_calibrate import render_calibration

    run = take_fields(RunOptions, options)
    settings = take_fields(CalibrationSettings, options)
    result = route_calibrate(routed, old, new, settings, run=run, track=out.track, **options)
    out.show(result, render_calibration(result, details=details))
