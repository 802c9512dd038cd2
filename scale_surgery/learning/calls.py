"""A call of the function of a command. It is run here, and shown as the line that a user types for the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from inspect import signature
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.files import to_json, write_json
from scale_surgery.command_lines import changed_options
from scale_surgery.learning.processes import launch_line, run_launched
from scale_surgery.progress import Track, no_track
from scale_surgery.training.settings import EvalData


@dataclass(frozen=True)
class Call:
    """A command with the function that does its work, and the arguments of both.

    Attributes:
        command: Name of the command.
        function: The function.
        arguments: Arguments by name. The first is the argument of the command, the others are options.
        launch: Options of `accelerate launch`, if several processes run the command.
        saved: File for the result, as the command's -o writes it.
        remark: Note on an option that the line lacks, because an earlier stage chooses its value.
    """

    command: str
    function: Any
    arguments: Mapping[str, Any]
    launch: Sequence[str] = ()
    saved: Path | None = None
    remark: str | None = None

    @property
    def words(self) -> list[str]:
        """The command as words: its arguments, and the options that differ from the function's defaults."""
        (_, first), *others = self.arguments.items()
        defaults = {name: parameter.default for name, parameter in signature(self.function).parameters.items()}
        options = [word for name, value in others for word in _typed(name, value, defaults.get(name))]
        saved = [] if self.saved is None else ["-o", self.saved]
        return list(
            map(str, (self.command, *(first if isinstance(first, list | tuple) else [first]), *options, *saved))
        )

    @property
    def line(self) -> str:
        """The line to type."""
        return launch_line(self.words, self.launch)

    def run(self, track: Track) -> Any:
        """Call the function and return its result; from several processes it is the JSON of the first."""
        if self.launch:
            return run_launched(self.words, self.launch, quiet=track is no_track)
        result = self.function(**self.arguments, track=track)
        if self.saved is not None:
            write_json(self.saved, to_json(result))
        return result


def _typed(name: str, value: Any, default: Any) -> Iterator[Any]:
    """Yield an argument of a function as options; a dataclass has one for each field."""
    option = "-o" if name == "output" else f"--{name.replace('_', '-')}"
    if isinstance(value, EvalData):
        yield from (
            word for side in ("old", "new") for file in vars(value)[side] for word in (option, f"{side}={file}")
        )
    elif is_dataclass(value):
        usual = default if is_dataclass(default) else type(value)()  # type: ignore[misc]
        yield from changed_options(value, usual)
    elif isinstance(value, bool):
        yield from [option] * value
    elif value != default:
        yield from (word for entry in (value if isinstance(value, list) else [value]) for word in (option, entry))
