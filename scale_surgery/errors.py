"""Errors that a user can meet, as one tree, and the problems that they hold.

    SurgeryError                     base class; the command line catches it once
    ├── PlanError                    the request cannot be met (layers, widths, variant)
    │   └── UnsupportedFamilyError   the model's architecture cannot be expanded
    ├── CheckpointError              files missing, unreadable, inconsistent, or the target exists
    ├── DataError                    texts to train on or to measure with: empty, wrong fields, too long
    ├── TrainingError                training cannot start, cannot be resumed, or had to stop
    ├── HubError                     the Hub cannot be reached, or rejects a push
    └── ServingError                 a server cannot start: packages missing, address taken

A broken promise is not an error. `verify` reports it as its result.

An error holds problems. A problem names a file or an option, the finding, the expected value and the fix. The code
raises it as an identifier with values. `problems.toml` holds the words, and `render` turns them into lines:

    raise CheckpointError(Problem("tensor-past-end", file, name=name, end=end, size=size))
"""

from __future__ import annotations

import functools
import string
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
MOST_LINES = 12
MOST_NAMES = 5
LISTING = Path(__file__).with_name("problems.toml")


@dataclass(frozen=True, init=False)
class Problem:
    """A problem: a code, the place, and the values of its sentence.

    Attributes:
        code: Its name in `problems.toml`. It is short and stable, for tests and scripts.
        where: The file, folder, tensor, key or option.
        details: The problems that it consists of, or that caused it.
        values: Values of its sentence: names, numbers, and messages of other programs.
    """

    code: str
    where: str
    details: tuple[Problem, ...]
    values: Mapping[str, Any] = field(hash=False)

    def __init__(self, code: str, where: object = "", *details: Problem, **values: Any) -> None:
        # keep only the text of an exception: its frames would keep tensors in memory
        plain = {key: f"{value}" if isinstance(value, Exception) else value for key, value in values.items()}
        for name, value in {"code": code, "where": f"{where}", "details": details, "values": plain}.items():
            object.__setattr__(self, name, value)

    def within(self, place: object) -> Problem:
        """Return the same problem with a file or object in front of its place."""
        inside = f"{place}: {self.where}" if self.where else place
        return Problem(self.code, inside, *self.details, **self.values)

    @property
    def found(self) -> str:
        """The finding."""
        return self._words("found").removeprefix(f"{self.where} " if self._is_joined else "")

    @property
    def expected(self) -> str:
        """The expected value; empty if the sentence has none."""
        return self._words("expected")

    @property
    def fix(self) -> str:
        """The fix, as a separate sentence; empty if there is none."""
        return self._words("fix")

    @property
    def phrase(self) -> str:
        """The sentence without the fix and without a full stop."""
        place = f"{self.where} " if self._is_joined else f"{self.where}: " if self.where else ""
        return f"{place}{self.found}" + (f", expected {self.expected}" if self.expected else "")

    @property
    def lines(self) -> list[str]:
        """The sentence, and the sentences of its details if it does not include them itself."""
        is_inside = "{details}" in "".join(_listing()[self.code].values())
        return [f"{self.phrase}.", *([] if is_inside else render(self.details))]

    def to_json(self) -> dict[str, Any]:
        """Return the problem as plain JSON values, with its words."""
        words = {"found": self.found, "expected": self.expected, "fix": self.fix}
        return {"code": self.code, "where": self.where, **words, "details": [part.to_json() for part in self.details]}

    def __str__(self) -> str:
        return "\n".join(render([self]))

    @property
    def _is_joined(self) -> bool:
        """True if the sentence continues after the place: "--budget is 3x", not "config.json: is incomplete"."""
        return _listing()[self.code]["found"].startswith("{where} ")

    def _words(self, part: str) -> str:
        template = _listing()[self.code].get(part, "")
        details = in_one_line([detail.phrase for detail in self.details])
        return _Words().vformat(template, (), {**self.values, "where": self.where, "details": details})


def render(problems: Iterable[Problem]) -> list[str]:
    """Return the problems as lines for the user.

    Of problems with one code, only the first dozen are listed. A fix that several problems share comes once, at their
    end.
    """
    lines: list[str] = []
    for fix, alike in groupby(problems, key=lambda problem: problem.fix):
        run: list[str] = []
        for _, same in groupby(alike, key=lambda problem: problem.code):
            some = list(same)
            run += [line for problem in some[:MOST_LINES] for line in problem.lines]
            run += [f"... and {len(some) - MOST_LINES} more."] if len(some) > MOST_LINES else []
        lines += [f"{run[0]} {fix}" if fix else run[0]] if len(run) == 1 else [*run, fix] if fix else run
    return lines


class _Words(string.Formatter):
    """A formatter of sentences: `{count:tensor}` counts, `{names:5}` lists five, `{names:or}` lists alternatives."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, int) and format_spec[:2].isalpha() and len(format_spec) > 1:
            return counted(value, format_spec)
        if isinstance(value, list | tuple):
            names = list(map(str, value))
            if format_spec.isdigit():
                return name_some(names, int(format_spec))
            return (f" {format_spec} " if format_spec else ", ").join(names)
        return str(format(value, format_spec))


@functools.cache
def _listing() -> dict[str, dict[str, str]]:
    return tomllib.loads(LISTING.read_text(encoding="utf-8"))


class SurgeryError(Exception):
    """An error that the user can act on. It is shown without a traceback."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)
        self.problems = problems

    @property
    def lines(self) -> tuple[str, ...]:
        """The message, one problem per entry. An entry may contain a line break if a name does."""
        return tuple(render(self.problems))

    def __str__(self) -> str:
        return "\n".join(self.lines)


class PlanError(SurgeryError):
    """A request that this model cannot meet."""


class UnsupportedFamilyError(PlanError):
    """An architecture that cannot be expanded. The message names the obstacle."""


class CheckpointError(SurgeryError):
    """Files that are missing, unreadable or inconsistent, or a target that already exists."""


class DataError(SurgeryError):
    """Texts for training or measuring that are missing, empty, too long or in a wrong form."""


class TextWarning(UserWarning):
    """A warning about skipped text. A command prints it as its own warning."""


class TrainingError(SurgeryError):
    """A training run that cannot start, cannot be resumed, or had to stop."""


class HubError(SurgeryError):
    """A Hub that cannot be reached, or that rejects a push."""


class ServingError(SurgeryError):
    """A server that cannot start, or a request to vLLM that its plugin cannot answer."""


def problems_of(error: Exception) -> tuple[Problem, ...]:
    """Return the problems of an error, as details of another problem.

    The message of a library's error becomes one problem.
    """
    return error.problems if isinstance(error, SurgeryError) else (Problem("other-program", error=error),)


def shorten(lines: Sequence[T], most: int = MOST_LINES, ending: str = ".") -> list[T | str]:
    """Shorten a list that may have an entry per tensor of a checkpoint. A last line counts the rest."""
    more = len(lines) - most
    return [*lines[:most], f"... and {more} more{ending}"] if more > 0 else list(lines)


def in_one_line(problems: Sequence[str]) -> str:
    """Join problems into one sentence. Problems beyond a dozen are counted."""
    return "; ".join(shorten(problems, ending=""))


def counted(count: int, noun: str) -> str:
    """Count things in a sentence: 1 prompt, 1,024 prompts."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def name_some(names: Sequence[str], most: int = MOST_NAMES) -> str:
    """Name the first of many things in a sentence, and count the rest."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
