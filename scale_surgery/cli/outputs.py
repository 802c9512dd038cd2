"""The option -o of all commands: a folder, or files with a suffix for their format.

A command that writes a model has one folder, `OUTPUT_FOLDER`. A command that shows a result has `files_option`, which
can be repeated. The suffix of each file determines its format. An unknown suffix is rejected before any work.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from scale_surgery.show.console import Output

Writer = Callable[[Path], object]
PICTURES = (".png", ".svg")
# suffixes of no model folder; names of models may contain dots, as in Qwen3-0.6B
FILES = (".json", ".jsonl", ".html", *PICTURES, ".csv", ".txt", ".safetensors", ".gguf")


class OutputFolder(click.Path):
    """An output folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, file_okay=False)

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        """Return the path, and reject one with the suffix of a file."""
        path = Path(os.fsdecode(super().convert(value, parameter, context)))
        if path.suffix.lower() in FILES:
            self.fail(f"{path} is the name of a file, expected that of a folder.", parameter, context)
        return path


class OutputFile(click.Path):
    """An output file. Its suffix, such as .json, determines the format."""

    def __init__(self, *suffixes: str) -> None:
        super().__init__(path_type=Path, dir_okay=False)
        self.suffixes = suffixes

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        """Return the path, and reject other suffixes."""
        path = Path(value)
        if path.suffix.lower() not in self.suffixes:
            choices = " or ".join(self.suffixes)
            self.fail(f"{path}: its suffix has to say what is written, expected {choices}.", parameter, context)
        # this also rejects an existing folder
        return super().convert(value, parameter, context)


OUTPUT_FOLDER = OutputFolder()


def files_option(*suffixes: str, help: str) -> Callable[..., Any]:
    """Make the option -o of a command that shows a result."""
    kind = OutputFile(*suffixes)
    return click.option("-o", "--output", "outputs", multiple=True, type=kind, help=f"{help} Can be repeated.")


def write_files(files: Sequence[Path], writers: Mapping[str, Writer], out: Output) -> None:
    """Write a result into files by their suffixes, and print their names."""
    # of several processes, only the first writes; suffixes were checked by `check_output_files`
    for file in files if out.is_first else ():
        writers[file.suffix.lower()](file)
    if files:
        out.say_file("written", *files)


def as_result(result: Any) -> Writer:
    """Return a writer of the JSON that --json prints."""

    def write(file: Path) -> None:
        from scale_surgery.checkpoint.files import to_json, write_json

        write_json(file, to_json(result))

    return write


def pictures(draw: Writer) -> dict[str, Writer]:
    """Return the writers of all picture formats. All use one function."""
    return dict.fromkeys(PICTURES, draw)
