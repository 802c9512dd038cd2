"""The command train: parse, call one function, hand its result to the console."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scale_surgery.cli.headings import Headed
from scale_surgery.cli.options import (
    FOLDER,
    code_of,
    options_from,
    output_options,
    overwrite_options,
    run_options,
    set_option,
    take_fields,
)
from scale_surgery.cli.outputs import OUTPUT_FOLDER
from scale_surgery.training.settings import EvalData, TrainingSettings, TrainingStart

if TYPE_CHECKING:
    from scale_surgery.show.console import Output


def read_sides(given: tuple[str, ...]) -> dict[str, list[str]]:
    """Parse `old=FILE` and `new=FILE`."""
    sides: dict[str, list[str]] = {"old": [], "new": []}
    for text in given:
        side, separator, file = text.partition("=")
        if side not in sides or not separator or not file:
            raise click.UsageError(f"--eval-data {text} is not old=FILE or new=FILE.")
        sides[side].append(file)
    return sides


@click.command(name="train", cls=Headed, first=("data", "output", "eval_data", "steps", "learning_rate"))
@click.argument("expanded", type=FOLDER)
@click.option(
    "--data",
    multiple=True,
    required=True,
    help="Text to learn: a file, a folder or a dataset of the Hub. Can be repeated.",
)
@click.option("-o", "--output", type=OUTPUT_FOLDER, help="Folder to write. Default: ./<name>-trained.")
@click.option(
    "--eval-data",
    multiple=True,
    help="Text to measure the loss on during the run: old=FILE or new=FILE. Can be repeated.",
)
@options_from(TrainingSettings)
@click.option(
    "--report-to",
    multiple=True,
    callback=lambda _, __, given: tuple(name.strip() for names in given for name in names.split(",")),
    help="Other loggers: tensorboard, wandb, mlflow or any that the Trainer of transformers supports. Separate several "
    "by commas. Can be repeated.",
)
@click.option(
    "--cache-dir",
    type=FOLDER,
    help="Folder to cache the tokens of the texts to learn. Default: the cache of Hugging Face, for texts of 64 MiB "
    "and more.",
)
@click.option("--resume", is_flag=True, help="Continue an interrupted run in the output folder.")
@set_option(TrainingSettings)
@overwrite_options
@run_options("device", code=code_of("EXPANDED"))
@output_options
def train_command(
    expanded: Path,
    data: tuple[str, ...],
    output: Path | None,
    eval_data: tuple[str, ...],
    out: Output,
    **options: Any,
) -> None:
    """Train the new tensors of EXPANDED. The base stays frozen.

    --data takes text files (one document each) and JSONL files. A line of JSONL has "text", or "question" and "answer",
    or "prompt" and "completion". --data also takes folders of JSONL or Parquet files, folders saved by the library
    datasets, and datasets of the Hub. Add options to the name of a Hub dataset after commas:
    ORG/NAME,split=train,column=body. Of a question, only the answer is learned.

    \b
    Example: scale-surgery train EXPANDED --data new.txt --eval-data old=old.txt
    On several GPUs: accelerate launch -m scale_surgery train EXPANDED --data FILE
    """
    from scale_surgery.running.options import RunOptions
    from scale_surgery.show.tables import render_schedule, render_training
    from scale_surgery.training.train import train

    settings = take_fields(TrainingSettings, options)
    done = train(
        expanded,
        data,
        output,
        settings,
        eval_data=EvalData(**read_sides(eval_data)),
        start=replace(
            take_fields(TrainingStart, options), announce=lambda schedule: out.say(render_schedule(schedule))
        ),
        run=take_fields(RunOptions, options),
        track=out.track,
    )
    out.show(done, render_training(done))
