"""The command train: parse, call one function, hand its result to the console."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scale_surgery.cli.options import FOLDER, Command, add_options, output_options, overwrite_options, take

if TYPE_CHECKING:
    from scale_surgery.show.console import Output


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


@click.command(name="train")
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
    **options: Any,
) -> None:
    """Train the new blocks of EXPANDED; the base stays as it is.

    Data are text files (one document each), JSONL with "text", or "question" and "answer", or "prompt" and
    "completion", and folders that the library datasets saved. Of a question the answer alone is learned.

    \b
    Example: scale-surgery train EXPANDED --data domain.jsonl --eval-data old=general.txt
    Several: accelerate launch -m scale_surgery train EXPANDED --data FILE
    """
    from scale_surgery.running.options import RunOptions
    from scale_surgery.show.tables import render_training
    from scale_surgery.training.settings import EvalData, TrainingSettings, TrainingStart
    from scale_surgery.training.train import train

    # a scheduler that ends a job is answered like somebody at the keyboard
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if train_only is not None:
        options["groups"] = tuple(name.strip() for name in train_only.split(","))
    settings = take(TrainingSettings, options)
    done = train(
        expanded,
        data,
        output,
        settings,
        eval_data=EvalData(**read_sides(eval_data)),
        start=take(TrainingStart, options),
        run=take(RunOptions, options),
        track=out.track,
    )
    out.show(done, render_training(done))
