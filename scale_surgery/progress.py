"""How long work tells how far it is: a function that is called with what was just done.

A terminal draws it as a bar, a log file gets lines of it (`show/console.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Progress(Protocol):
    """Called with an amount that was just done, in the unit of the total, and with a note to show beside it."""

    def __call__(self, advance: int, note: str = "") -> None:
        """Report."""


class Steps(int):
    """How many steps a training has, which a log counts; of other work it shows a share.

    Attributes:
        tokens: Tokens that the model reads in all steps, padding not counted.
    """

    tokens: int

    def __new__(cls, count: int, tokens: int) -> Steps:
        """Count steps and tokens."""
        steps = super().__new__(cls, count)
        steps.tokens = tokens
        return steps


class Finding(str):
    """A note that a log writes at once: what was measured, or that work begins.

    Attributes:
        kept: What of it a bar shows beside later notes, until the next finding.
    """

    kept: str

    def __new__(cls, text: str, kept: str = "") -> Finding:
        """Note a finding."""
        finding = super().__new__(cls, text)
        finding.kept = kept
        return finding


# given what is done and how much of it there is, yields such a function; a progress bar, say
Track = Callable[[str, int], AbstractContextManager[Progress]]


def no_progress(advance: int, note: str = "") -> None:
    """Report nothing."""


def no_track(label: str, total: int) -> AbstractContextManager[Progress]:
    """Show no progress bar."""
    return nullcontext(no_progress)
