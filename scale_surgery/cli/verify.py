"""The command verify: parse, call one function, hand its result to the console."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scale_surgery.cli.headings import Headed
from scale_surgery.cli.options import FOLDER, output_options, running_options, take_fields
from scale_surgery.cli.outputs import as_result, files_option, write_files

if TYPE_CHECKING:
    from scale_surgery.show.console import Output


@click.command(name="verify", cls=Headed)
@click.argument("expanded", type=FOLDER)
@click.option(
    "--base", help="Base model to compare with, a folder or a Hub id. Default: the base tensors inside EXPANDED."
)
@click.option("--revision", help="Branch, tag or commit of the base's Hub repository.")
@click.option(
    "--promise",
    "required",
    multiple=True,
    help="Promise that must hold. Can be repeated. Default: all promises of EXPANDED.",
)
@click.option(
    "--files-only",
    is_flag=True,
    help="Check files only and run no model. Promises about outputs are not checked.",
)
@running_options
@files_option(".json", help="Write the result to this .json file, as a certificate.")
@output_options
def verify_command(
    expanded: Path,
    outputs: tuple[Path, ...],
    required: tuple[str, ...],
    files_only: bool,
    out: Output,
    **options: Any,
) -> None:
    """Check the promises of EXPANDED, and show the numbers. The exit code is 1 if a promise is broken.

    \b
    recoverable           the base checkpoint comes back byte for byte
    output_at_init        before training, logits equal the base's bit for bit
    near_output_at_init   before training, logits equal the base's up to rounding
    old_vocabulary        on a text without new tokens, logits of the base's
                          tokens equal the base's bit for bit
    base_stream_always    after any training, the base's hidden state and logits
                          inside the model equal the base's bit for bit
    shut_gates            up to the first token at which a gate opens, a text
                          has the base's logits, bit for bit
    paths_as_alone        the path of each expansion in a routed model gives the
                          logits of that expansion alone, bit for bit
    bounded_forgetting    the loss of a text in a routed model exceeds the base's
                          by at most -ln(prior) nats; with K > 1 expansions, it
                          exceeds the best path's by at most ln(K + 1) nats

    \b
    Example: scale-surgery verify EXPANDED --base MODEL -o certificate.json
    """
    from scale_surgery.checkpoint.staging import check_output_files
    from scale_surgery.evidence.verification import OTHER_BASE
    from scale_surgery.evidence.verify import verify
    from scale_surgery.running.options import Probes, RunOptions
    from scale_surgery.show.commands import after_verification
    from scale_surgery.show.tables_verify import render_verification

    asked = {"--prompts": options["prompts_file"], "--max-new-tokens": options["max_new_tokens"]}
    if files_only and (unread := [option for option, value in asked.items() if value is not None]):
        raise click.UsageError(
            f"{', '.join(unread)} with --files-only: no model runs, so none is asked. Leave out one of the two."
        )
    check_output_files(outputs, [expanded, *filter(None, [options["base"], options["prompts_file"]])])
    probes, run = take_fields(Probes, options), take_fields(RunOptions, options)
    prompted = None if files_only else probes
    result = verify(expanded, probes=prompted, required=required, run=run, track=out.track, **options)
    if not result.recorded and result.not_run != OTHER_BASE:
        out.warn(f"{expanded} cannot be written, or changed meanwhile: the result is not recorded in it")
    out.show(result, render_verification(result))
    write_files(outputs, {".json": as_result(result)}, out)
    out.suggest(after_verification(result))
    sys.exit(0 if result.passed else 1)
