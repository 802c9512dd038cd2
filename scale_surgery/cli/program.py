"""The command line: a group of commands, each in its own module, which is imported when the command is called."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import click

# each command with its line in the list of commands
SUMMARIES = {
    "adopt": "Convert the checkpoint of another trainer to an expanded model.",
    "apply": "Add extracted new tensors to their base model.",
    "chat": "Talk to a model, and see the path of each token.",
    "compare": "Compare methods on your own model and text.",
    "compose": "Combine many expansions of one base into one model.",
    "demo": "Run every step on the small model of the package.",
    "evaluate": "Measure forgetting and learning of models.",
    "expand": "Widen chosen layers. The base's tensors keep their bytes.",
    "extract": "Write the new tensors alone, to share them like an adapter.",
    "generate": "Answer prompts, for scripts.",
    "hold-out": "Hold text out, to calibrate a router and to measure.",
    "inspect": "Describe a checkpoint from its headers.",
    "learn": "Teach a model a text and keep its base, in one job.",
    "merge": "Merge each linear layer's blocks into one matrix.",
    "plan": "Show the new tensors and costs of an expansion.",
    "push": "Push a folder to the Hub, with a model card.",
    "rank-layers": "Rank the layers by their change in a short training run.",
    "report": "Show the effect of training, as tables and as a page.",
    "route-calibrate": "Find the best settings for a router, and store them.",
    "route-export": "Add a router between the base and the expansion.",
    "route-report": "Show the path of each token of a text.",
    "serve": "Serve a model with OpenAI's endpoints.",
    "strip": "Restore the base model, every file byte for byte.",
    "train": "Train the new tensors. The base stays frozen.",
    "verify": "Check the promises of a model, with numbers.",
}


class Commands(Mapping[str, click.Command]):
    """The commands by name. Each is imported on use, because importing all takes longer than running `strip`."""

    def __getitem__(self, name: str) -> click.Command:
        summary, module = SUMMARIES[name], name.replace("-", "_")
        command: click.Command = getattr(import_module(f"scale_surgery.cli.{module}"), f"{module}_command")
        command.short_help = summary
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(SUMMARIES)

    def __len__(self) -> int:
        return len(SUMMARIES)


@contextmanager
def visible_usage() -> Iterator[None]:
    """Show control characters in usage errors as signs: shell completion may insert any file name."""
    try:
        yield
    except click.UsageError as error:
        from scale_surgery.visible import visible_text

        # click indents choices with tabs
        message = error.format_message().expandtabs(4)
        if (shown := visible_text(message)) == message:
            raise
        raise click.UsageError(shown, error.ctx) from error


class Program(click.Group):
    """A group of commands. Usage errors contain no control characters."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options before a command."""
        with visible_usage():
            return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing one."""
        with formatter.section("Commands"):
            formatter.write_dl(list(SUMMARIES.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Parse the arguments of a command, and run it."""
        with visible_usage():
            return super().invoke(ctx)


@click.group(
    cls=Program,
    commands=Commands(),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="scale-surgery", prog_name="scale-surgery")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Widen a language model, so that it learns new text and keeps its knowledge.

    \b
    scale-surgery learn MODEL --data domain.jsonl -o OUT

    \b
    Step by step:
    scale-surgery inspect MODEL
    scale-surgery rank-layers MODEL --data domain.jsonl
    scale-surgery plan MODEL --layers last:4
    scale-surgery expand MODEL --layers last:4 -o EXPANDED
    scale-surgery verify EXPANDED
    scale-surgery train EXPANDED --data domain.jsonl
    scale-surgery adopt SAVED --expanded EXPANDED -o TRAINED
    scale-surgery evaluate EXPANDED --old general.txt --new domain.jsonl
    scale-surgery report EXPANDED -o report.html
    scale-surgery route-export EXPANDED -o ROUTED
    scale-surgery chat ROUTED
    scale-surgery merge EXPANDED -o FUSED
    scale-surgery serve ROUTED
    scale-surgery extract EXPANDED -o EXTRACT
    scale-surgery compose MODEL EXTRACT EXTRACT2 -o COMPOSED
    scale-surgery strip EXPANDED -o BASE
    scale-surgery push EXPANDED user/name

    MODEL is a checkpoint folder or a Hub id. EXPANDED is an output folder of expand. Exit codes: 0 done, 1 failed or a
    check did not pass, 2 wrong usage.
    """
    open_closed_streams()
    ctx.with_resource(terminated_as_interrupted())


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Handle SIGTERM, which a scheduler sends, like Ctrl-C: work is kept, and children are ended."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def open_closed_streams() -> None:
    """Open closed standard streams on the null device.

    Otherwise the next opened file would get their number, and receive their output.
    """
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:
            # stays open for the whole process
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115
