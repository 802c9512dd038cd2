"""Every error that a user can meet, as one tree, and the problems that it holds.

    SurgeryError                     base class; the command line catches it once
    ├── PlanError                    the request cannot be met (layers, widths, variant)
    │   └── UnsupportedFamilyError   the model's architecture cannot be expanded
    ├── CheckpointError              files missing, unreadable, inconsistent, or the target exists
    ├── DataError                    texts to train on or to measure with: empty, wrong fields, too long
    ├── TrainingError                training cannot begin, cannot be resumed, or had to stop
    ├── HubError                     the Hub cannot be reached, or refuses
    └── ServingError                 a server cannot begin: packages missing, address taken

A broken promise is no error: it is the result of `verify`.

An error holds problems. A problem names the thing, what was found, what was expected and what to do. It is raised as
a code with values; its words are in `problems.toml`, and `render` makes lines of them:

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
    """One thing that is wrong.

    Attributes:
        code: Its name in `problems.toml`; short and stable, for tests and scripts.
        where: The file, folder, tensor, key or option.
        details: The problems that it consists of, or that caused it.
        values: What its sentence says: names, numbers, and the words of other programs.
    """

    code: str
    where: str
    details: tuple[Problem, ...]
    values: Mapping[str, Any] = field(hash=False)

    def __init__(self, code: str, where: object = "", *details: Problem, **values: Any) -> None:
        # the text of an exception: its frames would keep tensors in memory
        plain = {key: f"{value}" if isinstance(value, Exception) else value for key, value in values.items()}
        for name, value in {"code": code, "where": f"{where}", "details": details, "values": plain}.items():
            object.__setattr__(self, name, value)

    def within(self, place: object) -> Problem:
        """The same problem, with the file or the object in which its place lies before it."""
        inside = f"{place}: {self.where}" if self.where else place
        return Problem(self.code, inside, *self.details, **self.values)

    @property
    def found(self) -> str:
        """What was found."""
        return self._words("found").removeprefix(f"{self.where} " if self._is_joined else "")

    @property
    def expected(self) -> str:
        """What was expected, if the sentence says it."""
        return self._words("expected")

    @property
    def fix(self) -> str:
        """What to do, as a sentence of its own."""
        return self._words("fix")

    @property
    def phrase(self) -> str:
        """The sentence without what to do and without a full stop."""
        place = f"{self.where} " if self._is_joined else f"{self.where}: " if self.where else ""
        return f"{place}{self.found}" + (f", expected {self.expected}" if self.expected else "")

    @property
    def lines(self) -> list[str]:
        """The sentence, and those of its details below it if it does not name them itself."""
        is_inside = "{details}" in "".join(_listing()[self.code].values())
        return [f"{self.phrase}.", *([] if is_inside else render(self.details))]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, the words included."""
        words = {"found": self.found, "expected": self.expected, "fix": self.fix}
        return {"code": self.code, "where": self.where, **words, "details": [part.to_json() for part in self.details]}

    def __str__(self) -> str:
        return "\n".join(render([self]))

    @property
    def _is_joined(self) -> bool:
        """Whether the sentence goes on after the place: "--budget is 3x", not "config.json: is incomplete"."""
        return _listing()[self.code]["found"].startswith("{where} ")

    def _words(self, part: str) -> str:
        template = _listing()[self.code].get(part, "")
        details = in_one_line([detail.phrase for detail in self.details])
        return _Words().vformat(template, (), {**self.values, "where": self.where, "details": details})


def render(problems: Iterable[Problem]) -> list[str]:
    """The lines to show: a line each, those of one code shortened, and what helps against several said once."""
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
    """Fill in a sentence: `{count:tensor}` counts, `{names}` lists all, `{names:5}` the first, `{names:or}` choices."""

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
    """Something the user can act on; shown without a traceback."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)
        self.problems = problems

    @property
    def lines(self) -> tuple[str, ...]:
        """The message, a line each. An entry may contain a line break if a name does."""
        return tuple(render(self.problems))

    def __str__(self) -> str:
        return "\n".join(self.lines)


class PlanError(SurgeryError):
    """The request cannot be met by this model."""


class UnsupportedFamilyError(PlanError):
    """The model's architecture cannot be expanded; the message names what stands in the way."""


class CheckpointError(SurgeryError):
    """Files are missing, unreadable or inconsistent, or a target exists already."""


class DataError(SurgeryError):
    """Texts to train on or to measure with are missing, empty, in another form or too long."""


class TextWarning(UserWarning):
    """A part of the texts is left out; a command prints it as its own warning."""


class TrainingError(SurgeryError):
    """Training cannot begin, cannot be resumed, or had to stop."""


class HubError(SurgeryError):
    """The Hub cannot be reached, or refuses what was to be pushed."""


class ServingError(SurgeryError):
    """A server cannot begin: its packages are missing, or its address cannot be had."""


def problems_of(error: Exception) -> tuple[Problem, ...]:
    """The problems of an error, for the details of another; of a library's error, its words."""
    return error.problems if isinstance(error, SurgeryError) else (Problem("other-program", error=error),)


def shorten(lines: Sequence[T], most: int = MOST_LINES, ending: str = ".") -> list[T | str]:
    """Shorten a list of problems that may be as long as a checkpoint has tensors; a last line counts the rest."""
    more = len(lines) - most
    return [*lines[:most], f"... and {more} more{ending}"] if more > 0 else list(lines)


def in_one_line(problems: Sequence[str]) -> str:
    """Problems of one file as a sentence; those beyond a dozen are counted."""
    return "; ".join(shorten(problems, ending=""))


def counted(count: int, noun: str) -> str:
    """Count things in a sentence: 1 prompt, 1,024 prompts."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def name_some(names: Sequence[str], most: int = MOST_NAMES) -> str:
    """Name the first of many things in a sentence, and count the rest."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
