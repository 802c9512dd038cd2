"""Every error that a user can meet, as one tree.

    SurgeryError                     base class; the command line catches it once
    ├── PlanError                    the request cannot be met (layers, widths, variant)
    │   └── UnsupportedFamilyError   the model's architecture cannot be expanded
    ├── CheckpointError              files missing, unreadable, inconsistent, or the target exists
    ├── DataError                    texts to train on or to measure with: empty, wrong fields, too long
    ├── TrainingError                training cannot begin, cannot be resumed, or had to stop
    ├── HubError                     the Hub cannot be reached, or refuses
    └── ServingError                 a server cannot begin: packages missing, address taken

A broken promise is no error: it is the result of `verify`.

A message names the thing, what was found, what was expected and what to do. Several problems of one
request are reported together, one a line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MOST_LINES = 12
MOST_NAMES = 5


class SurgeryError(Exception):
    """Something the user can act on; shown without a traceback."""

    _lines: tuple[str, ...] = ()

    @classmethod
    def from_problems(cls, problems: Iterable[str]) -> SurgeryError:
        """One error that lists every problem, each on its own line."""
        lines = tuple(problems)
        error = cls("\n".join(lines))
        error._lines = lines
        return error

    @property
    def lines(self) -> tuple[str, ...]:
        """What is to be shown, a line each; a line break inside of one came with a name, and is none of ours."""
        return self._lines or (str(self),)


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


def shorten(lines: Sequence[str], most: int = MOST_LINES, ending: str = ".") -> list[str]:
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
