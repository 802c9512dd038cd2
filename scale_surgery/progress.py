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


class Total(int):
    """A total whose units a log counts, and does not show as a share.

    Attributes:
        unit: One of what is counted, such as "step".
        tokens: Tokens that a model reads in all of it, padding not counted; 0 if nobody asks how many a second.
    """

    unit: str
    tokens: int

    def __new__(cls, count: int, unit: str, tokens: int = 0) -> Total:
        """Count units."""
        total = super().__new__(cls, count)
        total.unit, total.tokens = unit, tokens
        return total


class Finding(str):
    """A note that a log writes at once: what was measured, or that work begins."""

    __slots__ = ()


# given what is done and how much of it there is, yields such a function; a progress bar, say
Track = Callable[[str, int], AbstractContextManager[Progress]]


def no_progress(advance: int, note: str = "") -> None:
    """Report nothing."""


def no_track(label: str, total: int) -> AbstractContextManager[Progress]:
    """Show no progress bar."""
    return nullcontext(no_progress)
