"""The command line: parse, call one function, hand its result to the console."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scale_surgery.cli.expand import expand_command, plan_command
from scale_surgery.cli.extract import apply_command, extract_command
from scale_surgery.cli.merge import merge_command
from scale_surgery.cli.options import (
    FILE,
    FOLDER,
    TEXTS,
    model_options,
    output_options,
    overwrite_options,
    reading_options,
    running_options,
    take,
)
from scale_surgery.cli.push import push_command
from scale_surgery.cli.rank_layers import rank_layers_command
from scale_surgery.cli.report import report_command
from scale_surgery.cli.route import route_export_command
from scale_surgery.cli.route_calibrate import route_calibrate_command
from scale_surgery.cli.route_report import route_report_command
from scale_surgery.cli.train import train_command

if TYPE_CHECKING:
    from scale_surgery.show.console import Output


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(version("scale-surgery"), prog_name="scale-surgery")
def main() -> None:
    """Widen a language model so that it can learn without losing what it knows.

    \b
    scale-surgery inspect MODEL
    scale-surgery rank-layers MODEL --data domain.jsonl
    scale-surgery plan MODEL --layers last:4
    scale-surgery expand MODEL --layers last:4 -o EXPANDED
    scale-surgery verify EXPANDED
    scale-surgery train EXPANDED --data domain.jsonl
    scale-surgery evaluate EXPANDED --old general.txt --new domain.jsonl
    scale-surgery report EXPANDED -o report.html
    scale-surgery route-export EXPANDED -o ROUTED
    scale-surgery merge EXPANDED -o FUSED
    scale-surgery extract EXPANDED -o EXTRACT
    scale-surgery strip EXPANDED -o BASE
    scale-surgery push EXPANDED user/name

    MODEL is a checkpoint folder or a Hub id; EXPANDED is a folder that expand wrote. Exit codes: 0 done, 1 failed or a
    check did not pass, 2 wrong usage.
    """


@main.command(name="inspect")
@model_options
@output_options
def inspect_command(model: str, revision: str | None, out: Output) -> None:
    """Describe MODEL: architecture, sizes, parameters, and what an expansion added. No weights are read.

    \b
    Example: scale-surgery inspect meta-llama/Llama-3.2-1B
    """
    from scale_surgery.planning.inspect import inspect
    from scale_surgery.show.tables import render_inspection

    found = inspect(model, revision=revision)
    out.show(found, render_inspection(found))


@main.command(name="verify")
@click.argument("expanded", type=FOLDER)
@click.option(
    "--base", help="Base model to compare with, a folder or a Hub id. Default: the base tensors inside EXPANDED."
)
@click.option("--revision", help="Branch, tag or commit of the base's Hub repository.")
@click.option(
    "--promise",
    "required",
    multiple=True,
    help="A promise that must hold; can be repeated. Default: all that EXPANDED makes.",
)
@click.option(
    "--files-only",
    is_flag=True,
    help="Check files only and run no model: promises about outputs are not checked.",
)
@running_options
@click.option("--report", type=FILE, help="Write the result to this JSON file, as a certificate.")
@output_options
def verify_command(
    expanded: Path, report: Path | None, required: tuple[str, ...], files_only: bool, out: Output, **options: Any
) -> None:
    """Check which promises EXPANDED keeps, and show the numbers; exit code 1 if one is broken.

    \b
    recoverable           the base checkpoint comes back byte for byte
    output_at_init        before training, logits equal the base's bit for bit
    near_output_at_init   before training, logits equal the base's up to rounding
    base_stream_always    after any training, the base's hidden state and logits
                          inside the model equal the base's bit for bit
    bounded_forgetting    a routed model's loss exceeds the base's by at most
                          -ln(prior) nats a text

    \b
    Example: scale-surgery verify EXPANDED --base MODEL --report certificate.json
    """
    from scale_surgery.checkpoint.files import write_json
    from scale_surgery.checkpoint.staging import check_output_files
    from scale_surgery.evidence.promises import PROMISES
    from scale_surgery.evidence.verify import verify
    from scale_surgery.running.options import Probes, RunOptions
    from scale_surgery.show.tables import render_verification

    unknown = [name for name in required if name not in PROMISES]
    if unknown:
        raise click.UsageError(f"--promise {unknown[0]} is not one of {', '.join(PROMISES)}.")
    check_output_files([report], [expanded, *filter(None, [options["base"]])])
    probes, run = take(Probes, options), take(RunOptions, options)
    prompted = None if files_only else probes
    result = verify(expanded, probes=prompted, required=required, run=run, track=out.track, **options)
    if not result.recorded:
        out.warn(f"{expanded} is read-only: the result is not recorded in its surgery.json")
    if report is not None:
        write_json(report, result.to_json())
    out.show(result, render_verification(result))
    sys.exit(0 if result.passed else 1)


@main.command(name="evaluate")
@click.argument("models", nargs=-1, required=True)
@click.option("--old", multiple=True, type=TEXTS, help="Text with what the base knows; can be repeated.")
@click.option("--new", multiple=True, type=TEXTS, help="Text with what was to be learned; can be repeated.")
@reading_options("MODELS")
@click.option(
    "--plot", type=FILE, help="Draw the loss on old text against that on new text, one point for each model. PNG."
)
@click.option("--revision", help="Branch, tag or commit of Hub repositories.")
@output_options
def evaluate_command(
    models: tuple[str, ...],
    old: tuple[Path, ...],
    new: tuple[Path, ...],
    plot: Path | None,
    out: Output,
    **options: Any,
) -> None:
    """Measure what MODELS forgot and learned: loss, perplexity and first-token accuracy on old and on new text.

    For an expanded model, its base and the model with its expansion switched off are measured too. Texts are as for
    train: text files, JSONL, folders saved by the library datasets. Of a question, only the answer is scored.

    \b
    Example: scale-surgery evaluate EXPANDED --old general.txt --new domain.jsonl
    """
    from scale_surgery.checkpoint.staging import check_output_files
    from scale_surgery.evidence.evaluate import evaluate
    from scale_surgery.running.options import RunOptions
    from scale_surgery.show.figure_plane import plot_plane
    from scale_surgery.show.tables import render_evaluation

    if not (old or new):
        raise click.UsageError("--old and --new are missing, give one of them or both.")
    if plot is not None and not (old and new):
        raise click.UsageError("--plot needs --old and --new: the plane has an axis for each.")
    check_output_files([plot], [*models, *old, *new])
    result = evaluate(models, old, new, run=take(RunOptions, options), track=out.track, **options)
    out.show(result, render_evaluation(result))
    if plot is not None:
        plot_plane(result, plot)
        out.say(f"\ndrawn to {plot}")


@main.command(name="strip")
@click.argument("expanded", type=FOLDER)
@click.option("-o", "--output", type=FOLDER, required=True, help="Folder to write.")
@overwrite_options
@output_options
def strip_command(expanded: Path, output: Path, base_weights: Any, overwrite: bool, out: Output) -> None:
    """Take the expansion off EXPANDED again: its base model, every file byte for byte.

    \b
    Example: scale-surgery strip EXPANDED -o BASE
    """
    from scale_surgery.show.tables import render_stripped
    from scale_surgery.surgery.strip import strip

    done = strip(expanded, output, base_weights=base_weights, overwrite=overwrite, track=out.track)
    out.show(done, render_stripped(done))


@main.command(name="demo")
@click.option(
    "-o", "--output", type=FOLDER, default=Path("demo"), show_default=True, help="Folder for all that it makes."
)
@output_options
def demo_command(output: Path, out: Output) -> None:
    """Run every step on the small model that comes with the package, and show the commands.

    \b
    Example: scale-surgery demo
    """
    from scale_surgery.demo import demo

    result = demo(output, out)
    sys.exit(0 if result.passed else 1)


for command in (
    plan_command,
    expand_command,
    train_command,
    extract_command,
    apply_command,
    merge_command,
    push_command,
    rank_layers_command,
    report_command,
    route_export_command,
    route_report_command,
    route_calibrate_command,
):
    main.add_command(command)

# what fits into one line of the list of commands
SHORT_HELP = {
    "apply": "Put extracted new tensors back on their base model.",
    "demo": "Run every step on the model that comes with the package.",
    "evaluate": "Measure what models forgot and learned.",
    "expand": "Widen chosen layers; the base's tensors keep their bytes.",
    "extract": "Take the new tensors alone, to share them like an adapter.",
    "inspect": "Describe a checkpoint from its headers.",
    "merge": "Merge each linear layer's blocks into one matrix.",
    "plan": "Show everything that expand would do.",
    "push": "Push a folder to the Hub, with a model card.",
    "rank-layers": "Find the layers that a text would change most.",
    "report": "Show what training changed, as tables and as a page.",
    "route-calibrate": "Find the best settings for a router, and store them.",
    "route-export": "Add a router that picks the base or the new path by token.",
    "route-report": "Show which path each token of a text came from.",
    "strip": "Get the base model back, every file byte for byte.",
    "train": "Train the new tensors; the base stays frozen.",
    "verify": "Check which promises hold, with numbers.",
}
for name, text in SHORT_HELP.items():
    main.commands[name].short_help = text
