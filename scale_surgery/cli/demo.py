"""The command demo: parse, call one function, hand its result to the console."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from scale_surgery.cli.headings import Headed
from scale_surgery.cli.options import output_options
from scale_surgery.cli.outputs import OUTPUT_FOLDER

if TYPE_CHECKING:
    from scale_surgery.show.console import Output


@click.command(name="demo", cls=Headed)
@click.option("-o", "--output", type=OUTPUT_FOLDER, default=Path("demo"), show_default=True, help="Folder to write.")
@output_options
def demo_command(output: Path, out: Output) -> None:
    """Run every step on the small model of the package, and show the commands.

    \b
    Example: scale-surgery demo
    """
    from scale_surgery.demo import demo

    result = demo(output, out)
    sys.exit(0 if result.passed else 1)
