"""Progress of long work: a function that is called with each finished amount.

`show/console.py` draws it as a bar on a terminal, or writes lines into a log file.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Progress(Protocol):
    """A function that is called with each finished amount, in the unit of the total, and a note to show."""

    def __call__(self, advance: int, note: str = "") -> None:
        """Report a finished amount."""


class Steps(int):
    """A number of training steps. A log counts steps, and shows a share for other work.

    Attributes:
        tokens: Tokens that the model reads in all steps, without padding.
    """

    tokens: int

    def __new__(cls, count: int, tokens: int) -> Steps:
        """Create a number of steps with a number of tokens."""
        steps = super().__new__(cls, count)
        steps.tokens = tokens
        return steps


class Finding(str):
    """A note that a log writes at once: a measurement, or the start of some work.

    Attributes:
        kept: The part that a bar shows in front of later notes, until the next finding.
    """

    kept: str

    def __new__(cls, text: str, kept: str = "") -> Finding:
        """Create a finding."""
        finding = super().__new__(cls, text)
        finding.kept = kept
        return finding


# given a label and a total, yields a `Progress`, such as a progress bar
Track = Callable[[str, int], AbstractContextManager[Progress]]


def no_progress(advance: int, note: str = "") -> None:
    """Report nothing."""


def no_track(label: str, total: int) -> AbstractContextManager[Progress]:
    """Show no progress bar."""
    return nullcontext(no_progress)
