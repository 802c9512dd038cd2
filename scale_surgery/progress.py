"""How long work tells how far it is: a function that is called with what was just done."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

# called with an amount that was just done, in bytes or in parameters
Progress = Callable[[int], None]
# given what is done and how much of it there is, yields such a function; a progress bar, say
Track = Callable[[str, int], AbstractContextManager[Progress]]


def no_progress(advance: int) -> None:
    """Report nothing."""


def no_track(label: str, total: int) -> AbstractContextManager[Progress]:
    """Show no progress bar."""
    return nullcontext(no_progress)
