"""Ctrl-C while a model answers: it stops the answer, and not the program."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class StopAtOnce(KeyboardInterrupt):
    """Somebody stopped an answer and does not wait for its next token."""


class Interrupt:
    """Whether somebody stopped an answer.

    The first Ctrl-C lets the model finish its token, so that nothing is left half done. The next one, for those who
    wait long for a first token, raises, but only while tokens are made: not while a model is switched to its base.
    """

    def __init__(self) -> None:
        self.times, self.is_speaking = 0, False

    def __call__(self) -> bool:
        """Whether to stop."""
        return self.times > 0

    def press(self, *_: Any) -> None:
        """Take a Ctrl-C."""
        self.times += 1
        if self.times > 1 and self.is_speaking:
            raise StopAtOnce

    @contextmanager
    def speaking(self) -> Iterator[None]:
        """Let a second Ctrl-C raise inside a `with` block."""
        self.is_speaking = True
        try:
            yield
        finally:
            self.is_speaking = False


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Take each Ctrl-C inside a `with` block as a wish to stop; the main thread alone can do so."""
    interrupt = Interrupt()
    before = signal.signal(signal.SIGINT, interrupt.press)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
