"""The command line: parse, call one function, hand its result to the console."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scale_surgery import __version__
from scale_surgery.cli_extract import apply_command, extract_command
from scale_surgery.cli_merge import merge_command
from scale_surgery.cli_push import push_command
from scale_surgery.cli_rank_layers import rank_layers_command
from scale_surgery.cli_report import report_command
from scale_surgery.cli_route_calibrate import route_calibrate_command
from scale_surgery.cli_route_report import route_report_command
from scale_surgery.cli_routing import route_export_command
from scale_surgery.methods import METHODS, VARIANTS
from scale_surgery.options import (
    FILE,
    FOLDER,
    TEXTS,
    Command,
    add_options,
    output_options,
    overwrite_options,
    parse_size,
    reading_options,
    running_options,
)

if TYPE_CHECKING:
    from scale_surgery.console import Output
    from scale_surgery.request import Request


def model_options(command: Command) -> Command:
    """Add what says which model is meant."""
    command = click.option("--revision", help="Branch, tag or commit of a Hub repository.")(command)
    return click.argument("model")(command)


def request_options(command: Command) -> Command:
    """Add what makes a `Request`; defaults stand in the dataclass."""
    inits = click.Choice(["svd", "random", "zero"])
    options = [
        click.option(
            "--layers", help="Layers to expand, zero-based, ends included: 20-31, 0,4,8, -1, last:4, every:4, all."
        ),
        click.option(
            "--method",
            type=click.Choice(list(METHODS)),
            help="scale: new blocks; grow: copies of the MLP; depth: copies of whole layers. Default: scale.",
        ),
        click.option(
            "--variant",
            type=click.Choice(VARIANTS),
            help="What trains. Default: preserve (scale), grow-freeze (grow), depth (depth).",
        ),
        click.option("--copies", type=int, help="MLPs in a grown layer, the original included (grow). Default: 2."),
        click.option("--collaborative-layers", help="Layers with W12 (adapt). Default: all expanded layers."),
        click.option(
            "--collaborate", type=click.Choice(["attn", "ffn", "both"]), help="Where W12 stands (adapt). Default: attn."
        ),
        click.option("--ratio", type=float, help="Added width as a share of the base's. Default: 0.125."),
        click.option(
            "--up-width",
            type=int,
            help="Features added to the residual stream, a multiple of the head size. Default: from --ratio.",
        ),
        click.option("--up-kv-heads", type=int, help="Key/value heads added in each layer. Default: from --ratio."),
        click.option("--up-inner-width", type=int, help="Features added inside each MLP. Default: from --ratio."),
        click.option("--init-w21", type=inits, help="How W21 starts. Default: svd."),
        click.option("--init-w22", type=inits, help="How W22 starts. Default: zero."),
        click.option(
            "--init-embedding",
            type=click.Choice(["svd", "zero"]),
            help="How new embedding columns start. Default: svd.",
        ),
        click.option(
            "--svd",
            type=click.Choice(["exact", "fast"]),
            help="Eigenvectors in float64, or a randomized range finder. Default: fast.",
        ),
        click.option("--seed", type=int, help="Seed of everything random. Default: 0."),
        click.option(
            "--dtype",
            type=click.Choice(["float32", "float16", "bfloat16"]),
            help="Of new tensors. Default: as the tensor beside.",
        ),
    ]
    return add_options(command, options)


def make_request(options: dict[str, Any]) -> Request | None:
    """A request from command line options; None where no layers were given."""
    from scale_surgery.request import Request

    given = {name: value for name, value in options.items() if value is not None}
    if "layers" not in given:
        if given:
            named = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise click.UsageError(f"{named} needs --layers.")
        return None
    return Request(**given)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="scale-surgery")
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

    MODEL is a folder or a Hub id. Exit codes: 0 done, 1 failed or a check did not pass, 2 wrong usage.
    """


@main.command(name="inspect")
@model_options
@output_options
def inspect_command(model: str, revision: str | None, out: Output) -> None:
    """Describe MODEL from its headers: family, sizes, parameters, and what an expansion added.

    \b
    Example: scale-surgery inspect meta-llama/Llama-3.2-1B
    """
    from scale_surgery.inspect import inspect
    from scale_surgery.tables import render_inspection

    found = inspect(model, revision=revision)
    out.show(found, render_inspection(found))


@main.command(name="plan")
@model_options
@request_options
@click.option("-o", "--output", type=FILE, help="Write the plan as JSON, for expand --plan.")
@click.option("--details", is_flag=True, help="List every new tensor.")
@output_options
def plan_command(
    model: str, revision: str | None, output: Path | None, details: bool, out: Output, **options: Any
) -> None:
    """Show everything that expand would do to MODEL; no weight is read.

    \b
    Example: scale-surgery plan MODEL --layers 20-31 --variant adapt -o plan.json
    """
    from scale_surgery.plan import plan, save_plan
    from scale_surgery.plan_tables import render_plan
    from scale_surgery.staging import check_output_files

    request = make_request(options)
    if request is None:
        raise click.UsageError("--layers is missing, for example --layers last:4.")
    check_output_files([output], [model])
    made = plan(model, request, revision=revision)
    if output is not None:
        save_plan(made, output)
    out.show(made, render_plan(made, details=details))
    if output is not None:
        out.say(f"\nwritten to {output}; execute it with scale-surgery expand {model} --plan {output}")


@main.command(name="expand")
@model_options
@request_options
@click.option("-o", "--output", type=FOLDER, help="Folder to be. Default: ./<name>-scale.")
@click.option("--plan", "plan_file", type=FILE, help="Execute exactly this saved plan.")
@click.option("--dry-run", is_flag=True, help="Show the plan and stop; the same as the command plan.")
@overwrite_options
@click.option("--device", default="cpu", show_default=True, help="Where decompositions are computed: cpu, cuda, ...")
@click.option(
    "--trust-remote-code", "--trust_remote_code", is_flag=True, help="Let a custom tokenizer run its own code."
)
@output_options
def expand_command(
    model: str,
    revision: str | None,
    output: Path | None,
    plan_file: Path | None,
    dry_run: bool,
    base_weights: Any,
    overwrite: bool,
    device: str,
    trust_remote_code: bool,
    out: Output,
    **options: Any,
) -> None:
    """Widen chosen layers of MODEL; every pretrained tensor keeps its bytes.

    \b
    Example: scale-surgery expand MODEL --layers 20-31
    """
    from scale_surgery.expand import expand
    from scale_surgery.plan import check_same_plan, load_request, plan
    from scale_surgery.plan_tables import render_plan
    from scale_surgery.tables import render_expansion

    request = make_request(options)
    if (request is None) == (plan_file is None):
        raise click.UsageError("Give --layers, or --plan with a saved plan, one of the two.")
    made = plan(model, request or load_request(plan_file), revision=revision)  # type: ignore[arg-type]
    if plan_file is not None:
        check_same_plan(made, plan_file)
    if dry_run:
        out.show(made, render_plan(made))
        return
    out.say(render_plan(made))
    done = expand(
        model,
        request,
        output,
        plan_file=plan_file,
        revision=revision,
        base_weights=base_weights,
        device=device,
        overwrite=overwrite,
        trust_remote_code=trust_remote_code,
        track=out.track,
    )
    if done.left_out:
        out.warn(f"weights in other formats are not taken along: {', '.join(done.left_out)}")
    out.show(done, render_expansion(done))


@main.command(name="verify")
@click.argument("expanded", type=FOLDER)
@click.option("--base", help="Base model to compare with, a folder or a Hub id. Default: the one inside EXPANDED.")
@click.option("--revision", help="Branch, tag or commit of the base's Hub repository.")
@click.option(
    "--promise", "required", multiple=True, help="Promise that must hold, repeatable. Default: all that are claimed."
)
@click.option(
    "--files-only",
    is_flag=True,
    help="Check bytes and structure; run no model. Promises about outputs are then not checked.",
)
@running_options
@click.option("--report", type=FILE, help="Write the certificate as JSON.")
@output_options
def verify_command(
    expanded: Path, memory: str, report: Path | None, required: tuple[str, ...], out: Output, **options: Any
) -> None:
    """Prove which promises hold for EXPANDED, with numbers; exit code 1 where one is broken.

    \b
    Example: scale-surgery verify EXPANDED --base MODEL --report certificate.json
    """
    from scale_surgery.staging import check_output_files, write_json
    from scale_surgery.tables import render_verification
    from scale_surgery.verify import PROMISES, verify

    unknown = [name for name in required if name not in PROMISES]
    if unknown:
        raise click.UsageError(f"--promise {unknown[0]} is not one of {', '.join(PROMISES)}.")
    check_output_files([report], [expanded, *filter(None, [options["base"]])])
    result = verify(expanded, required=required, memory_bytes=parse_size(memory), track=out.track, **options)
    if not result.recorded:
        out.warn(f"{expanded} is read-only: the result is not recorded in its surgery.json")
    if report is not None:
        write_json(report, result.to_json())
    out.show(result, render_verification(result))
    sys.exit(0 if result.passed else 1)


def read_sides(given: tuple[str, ...]) -> dict[str, list[Path]]:
    """Read `old=FILE` and `new=FILE`."""
    sides: dict[str, list[Path]] = {"old": [], "new": []}
    for text in given:
        side, separator, file = text.partition("=")
        if side not in sides or not separator or not file:
            raise click.UsageError(f"--eval-data {text} is not old=FILE or new=FILE.")
        sides[side].append(Path(file))
    return sides


def training_options(command: Command) -> Command:
    """Add what makes `TrainingSettings`; defaults stand in the dataclass."""
    options = [
        click.option("--sequence-length", type=int, help="Tokens of a sequence. Default: the context, at most 1024."),
        click.option(
            "--packing/--padding",
            default=None,
            help="Cut all documents, one after the other, into full sequences (the default), or make each document a "
            "padded sequence.",
        ),
        click.option("--learn-prompts", is_flag=True, default=None, help="Learn questions too, not answers alone."),
        click.option("--steps", type=int, help="Optimizer steps. Default: what --epochs takes."),
        click.option("--epochs", type=float, help="Passes over the data. Default: 1."),
        click.option("--batch-size", type=int, help="Sequences in a forward pass of one process. Default: 8."),
        click.option("--gradient-accumulation", type=int, help="Forward passes in an optimizer step. Default: 1."),
        click.option("--learning-rate", type=float, help="Highest learning rate. Default: 0.001."),
        click.option(
            "--schedule",
            type=click.Choice(["linear", "cosine", "constant"]),
            help="How the learning rate falls after the warm-up. Default: linear.",
        ),
        click.option("--warmup", type=float, help="Share of the steps in which it rises. Default: 0.06."),
        click.option("--weight-decay", type=float, help="Of AdamW. Default: 0."),
        click.option("--max-gradient-norm", type=float, help="Gradients are clipped to it; 0: not. Default: 1."),
        click.option("--train-only", help="Groups that train, such as w12,w21. Default: every expansion tensor."),
        click.option(
            "--routed", is_flag=True, default=None, help="Loss on the routed output, not on the adapt path alone."
        ),
        click.option("--seed", type=int, help="Seed of the order of the data. Default: 0."),
        click.option("--bf16/--no-bf16", default=None, help="Compute in bfloat16. Default: as the base is stored."),
        click.option(
            "--gradient-checkpointing",
            is_flag=True,
            default=None,
            help="Compute activations again in the backward pass instead of keeping them.",
        ),
        click.option("--save-every", type=int, help="Steps between checkpoints. Default: a tenth of the run."),
        click.option("--eval-every", type=int, help="Steps between measurements. Default: a tenth of the run."),
        click.option(
            "--log-every", type=int, help="Steps between entries of the log. Default: 10, at most a tenth of the run."
        ),
    ]
    return add_options(command, options)


@main.command(name="train")
@click.argument("expanded", type=FOLDER)
@click.option(
    "--data",
    multiple=True,
    required=True,
    type=click.Path(path_type=Path),
    help="What to learn, repeatable: see below.",
)
@click.option("-o", "--output", type=FOLDER, help="Folder to be. Default: ./<name>-trained.")
@click.option("--eval-data", multiple=True, help="old=FILE or new=FILE, repeatable: measure on it during the run.")
@training_options
@click.option("--resume", is_flag=True, help="Continue an interrupted run in the output folder.")
@overwrite_options
@click.option("--device", type=click.Choice(["auto", "cpu"]), default="auto", show_default=True, help="Where to train.")
@click.option(
    "--trust-remote-code",
    "--trust_remote_code",
    is_flag=True,
    help="Run the code in EXPANDED instead of this program's own.",
)
@output_options
def train_command(
    expanded: Path,
    data: tuple[Path, ...],
    output: Path | None,
    eval_data: tuple[str, ...],
    train_only: str | None,
    out: Output,
    base_weights: Any,
    resume: bool,
    overwrite: bool,
    device: Any,
    trust_remote_code: bool,
    **options: Any,
) -> None:
    """Train the new blocks of EXPANDED; the base stays as it is.

    Data are text files (one document each), JSONL with "text", or "question" and "answer", or "prompt" and
    "completion", and folders that the library datasets saved. Of a question the answer alone is learned.

    \b
    Example: scale-surgery train EXPANDED --data domain.jsonl --eval-data old=general.txt
    Several: accelerate launch -m scale_surgery train EXPANDED --data FILE
    """
    from scale_surgery.settings import TrainingSettings
    from scale_surgery.tables import render_training
    from scale_surgery.train import train

    # a scheduler that ends a job is answered like somebody at the keyboard
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    given = {name: value for name, value in options.items() if value is not None}
    if train_only is not None:
        given["groups"] = tuple(name.strip() for name in train_only.split(","))
    done = train(
        expanded,
        data,
        output,
        TrainingSettings(**given),
        **read_sides(eval_data),
        base_weights=base_weights,
        resume=resume,
        overwrite=overwrite,
        device=device,
        trust_remote_code=trust_remote_code,
        track=out.track,
    )
    out.show(done, render_training(done))


@main.command(name="evaluate")
@click.argument("models", nargs=-1, required=True)
@click.option("--old", multiple=True, type=TEXTS, help="Text that tells what the base knows, repeatable.")
@click.option("--new", multiple=True, type=TEXTS, help="Text with what was to be learned, repeatable.")
@reading_options("MODELS")
@click.option("--plot", type=FILE, help="Draw old loss against new loss, a point for each model, as PNG.")
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
    """Show what MODELS forgot and learned: loss, perplexity and first-token accuracy on old and on new text.

    Of an expanded model, its base and the model with its expansion disabled are measured too. Texts are as for
    train: text files, JSONL, folders that the library datasets saved. Of a question the answer alone is scored.

    \b
    Example: scale-surgery evaluate EXPANDED --old general.txt --new domain.jsonl
    """
    from scale_surgery.evaluate import evaluate
    from scale_surgery.plots import plot_plane
    from scale_surgery.staging import check_output_files
    from scale_surgery.tables import render_evaluation

    if not (old or new):
        raise click.UsageError("--old and --new are missing, give one of them or both.")
    if plot is not None and not (old and new):
        raise click.UsageError("--plot needs --old and --new: the plane has an axis for each.")
    check_output_files([plot], [*models, *old, *new])
    result = evaluate(models, old, new, track=out.track, **options)
    out.show(result, render_evaluation(result))
    if plot is not None:
        plot_plane(result, plot)
        out.say(f"\ndrawn to {plot}")


@main.command(name="strip")
@click.argument("expanded", type=FOLDER)
@click.option("-o", "--output", type=FOLDER, required=True, help="Folder to be.")
@overwrite_options
@output_options
def strip_command(expanded: Path, output: Path, base_weights: Any, overwrite: bool, out: Output) -> None:
    """Give back the base model that EXPANDED stands on, every file byte for byte.

    \b
    Example: scale-surgery strip EXPANDED -o BASE
    """
    from scale_surgery.strip import strip
    from scale_surgery.tables import render_stripped

    done = strip(expanded, output, base_weights=base_weights, overwrite=overwrite, track=out.track)
    out.show(done, render_stripped(done))


@main.command(name="demo")
@click.option("-o", "--output", type=FOLDER, default=Path("demo"), show_default=True, help="Folder for what it makes.")
@output_options
def demo_command(output: Path, out: Output) -> None:
    """Run the whole job on the shipped model, and show the commands.

    \b
    Example: scale-surgery demo
    """
    from scale_surgery.demo import demo

    result = demo(output, out)
    sys.exit(0 if result.passed else 1)


for command in (
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
    "apply": "Put an extracted expansion back on its base.",
    "demo": "Run the whole job on the shipped model.",
    "evaluate": "Show what models forgot and learned.",
    "expand": "Widen chosen layers; base tensors keep their bytes.",
    "extract": "Take the expansion alone, to share it without the base.",
    "inspect": "Describe a model from its headers.",
    "merge": "One matrix for each linear: fused, stock, or blocks again.",
    "plan": "Show everything that expand would do.",
    "push": "Push a folder to the Hub, with a model card from facts.",
    "rank-layers": "Find the layers that a text would change most.",
    "report": "Show what training did, as tables and as a page.",
    "route-calibrate": "Find the best numbers for a router, and set them.",
    "route-export": "Give a model a router: two paths in one forward pass.",
    "route-report": "Show which path each token of a text came from.",
    "strip": "Give back the base model, every file byte for byte.",
    "train": "Train the new blocks; the base stays as it is.",
    "verify": "Prove which promises hold, with numbers.",
}
for name, text in SHORT_HELP.items():
    main.commands[name].short_help = text
