"""The command generate: parse, call one function, hand its result to the console."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scale_surgery.cli.headings import Headed
from scale_surgery.cli.options import (
    TEXTS,
    add_options,
    code_of,
    model_options,
    options_from,
    output_options,
    run_options,
    take_fields,
)
from scale_surgery.cli.outputs import as_result, files_option, write_files
from scale_surgery.talking.settings import GenerationSettings

if TYPE_CHECKING:
    from scale_surgery.show.console import Output

Decorator = Callable[..., Any]


def asking_options(command: Decorator) -> Decorator:
    """Add options for prompting, sampling and running a model."""
    compare = click.option(
        "--compare", is_flag=True, help="Show the answer of the base model beside that of the expanded model."
    )
    asked = options_from(GenerationSettings)
    return add_options(command, [asked, compare, run_options("dtype", "device", code=code_of("MODEL"))])


def look_options(command: Decorator) -> Decorator:
    """Add options for showing answers."""
    paths = click.option(
        "--paths/--no-paths",
        default=None,
        help="Show the path of each token of a routed model: by colour, or in ⟦⟧ if the output has no colours. "
        "Default: show it only in colour.",
    )
    return paths(command)


@click.command(name="generate", cls=Headed, first=("prompts", "files", "samples", "outputs", "compare"))
@model_options
@click.option("--prompt", "prompts", multiple=True, help="Prompt to answer. Can be repeated.")
@click.option(
    "--prompts",
    "files",
    multiple=True,
    type=TEXTS,
    help='File of prompts, one a line, or JSONL with {"prompt"} or {"question"}. Can be repeated.',
)
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    help="Number of texts to sample from the base of MODEL into -o OLD.jsonl, for --old of other commands. With a chat "
    "template they are answers to instructions of this package. Otherwise, or with --raw, each starts from the "
    "tokenizer's BOS token, or from EOS if there is no BOS. Only --raw, --max-new-tokens, --temperature (default: 1) "
    "and --seed apply.",
)
@asking_options
@look_options
@files_option(".jsonl", ".json", help="Write one line of JSON for each prompt or sample as .jsonl, or all as .json.")
@output_options
def generate_command(
    model: str,
    prompts: tuple[str, ...],
    files: tuple[Path, ...],
    samples: int | None,
    compare: bool,
    outputs: tuple[Path, ...],
    out: Output,
    **options: Any,
) -> None:
    """Answer prompts with MODEL, a stock, expanded, routed, composed or fused model. For a conversation, use chat.

    Without --prompt and --prompts, the prompt is the whole text on stdin. Each prompt is answered on its own. Decoding
    is greedy by default. Exception: it samples if generation_config.json of MODEL says so.

    \b
    Example: scale-surgery generate ROUTED --prompt "Once upon a time"
             scale-surgery generate MODEL --samples 500 -o old.jsonl
    """
    if samples is not None:
        if prompts or files or compare or options.pop("paths"):
            raise click.UsageError("--samples takes no prompt, and nothing is shown of them. Leave the others out.")
        if [file.suffix.lower() for file in outputs] != [".jsonl"]:
            raise click.UsageError("--samples needs one file for the texts, give -o OLD.jsonl.")
        _write_samples(model, outputs[0], samples, out, options)
        return
    from scale_surgery.checkpoint.staging import check_output_files
    from scale_surgery.running.options import RunOptions
    from scale_surgery.show.answers import AnswerPrinter
    from scale_surgery.talking.generate import generate, write_answers
    from scale_surgery.talking.records import Look
    from scale_surgery.text.documents import read_questions
    from scale_surgery.text.sources import paths_of

    check_output_files(outputs, [model, *paths_of(files)])
    asked = [*prompts, *read_questions(files)] or [_from_stdin()]
    settings, look, run = (
        take_fields(GenerationSettings, options),
        take_fields(Look, options),
        take_fields(RunOptions, options),
    )
    printer = AnswerPrinter(out, model, asked, look, compare=compare)
    result = generate(model, asked, settings, compare=compare, run=run, on_token=printer, **options)
    printer.end(result)
    if out.as_json:
        out.show(result, "")
    write_files(outputs, {".jsonl": lambda file: write_answers(result, file), ".json": as_result(result)}, out)


def _write_samples(model: str, output: Path, count: int, out: Output, options: dict[str, Any]) -> None:
    from scale_surgery.running.options import RunOptions
    from scale_surgery.show.layout import Facts
    from scale_surgery.talking.samples import write_samples_of

    settings, run = take_fields(GenerationSettings, options), take_fields(RunOptions, options)
    done = write_samples_of(model, output, count, settings, run=run, track=out.track, **options)
    rows = [("written", str(output)), ("texts", f"{done.texts:,}"), ("tokens", f"{done.tokens:,}")]
    rows += [("began with", done.begun)] if done.begun else []
    rows += [("note", done.found)] if done.found else []
    out.show(done, Facts("samples", rows))


def _from_stdin() -> str:
    if sys.stdin.isatty():
        raise click.UsageError("There is no prompt. Give --prompt, --prompts FILE, or a text on stdin.")
    text = sys.stdin.buffer.read().decode("utf-8", "replace").removesuffix("\n")
    if not text.strip():
        raise click.UsageError("There is no prompt: stdin is empty. Give --prompt, --prompts FILE, or a text on stdin.")
    return text
