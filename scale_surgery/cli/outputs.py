"""What -o means in every command: a folder, or files whose suffix says what they are.

A command that writes a model has one folder, `OUTPUT_FOLDER`. A command that has a result to show has `files_option`:
it may be given several times, each file is written in the form that its suffix names, and a suffix that is none of the
command's is refused before any work.
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
# a model folder is not called so; names of models may hold dots, as in Qwen3-0.6B
FILES = (".json", ".jsonl", ".html", *PICTURES, ".csv", ".txt", ".safetensors", ".gguf")


class OutputFolder(click.Path):
    """A folder to be."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, file_okay=False)

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        """Read it; what has the suffix of a file is refused."""
        path = Path(os.fsdecode(super().convert(value, parameter, context)))
        if path.suffix.lower() in FILES:
            self.fail(f"{path} is the name of a file, expected that of a folder.", parameter, context)
        return path


class OutputFile(click.Path):
    """A file to be, whose suffix, such as .json, says what it is."""

    def __init__(self, *suffixes: str) -> None:
        super().__init__(path_type=Path, dir_okay=False)
        self.suffixes = suffixes

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        """Read it; another suffix is refused."""
        path = Path(value)
        if path.suffix.lower() not in self.suffixes:
            choices = " or ".join(self.suffixes)
            self.fail(f"{path}: its suffix has to say what is written, expected {choices}.", parameter, context)
        # a folder of that name is refused here too
        return super().convert(value, parameter, context)


OUTPUT_FOLDER = OutputFolder()


def files_option(*suffixes: str, help: str) -> Callable[..., Any]:
    """Make -o of a command that has a result to show."""
    kind = OutputFile(*suffixes)
    return click.option("-o", "--output", "outputs", multiple=True, type=kind, help=f"{help} Can be repeated.")


def write_files(files: Sequence[Path], writers: Mapping[str, Writer], out: Output) -> None:
    """Write a result into files, each in the form that its suffix names, and say so."""
    # of several processes the first does; suffixes were checked by `check_output_files`
    for file in files if out.is_first else ():
        writers[file.suffix.lower()](file)
    if files:
        out.say_file("written", *files)


def as_result(result: Any) -> Writer:
    """Write a result as the JSON that --json prints."""

    def write(file: Path) -> None:
        from scale_surgery.checkpoint.files import write_json
        from scale_surgery.show.console import to_json

        write_json(file, to_json(result))

    return write


def pictures(draw: Writer) -> dict[str, Writer]:
    """The forms of a picture, all drawn by one function."""
    return dict.fromkeys(PICTURES, draw)
