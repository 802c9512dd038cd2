"""Ctrl-C in a conversation: it takes a line back or stops an answer, and never ends the program."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class StopAtOnce(KeyboardInterrupt):
    """Somebody stopped an answer and does not wait for its next token."""


class Interrupt:
    """How often Ctrl-C was pressed since somebody began to type, or since an answer ended.

    A handler of signals runs between any two steps of a program, so it only counts: what it raised could leave half of
    a line printed, or escape from where the last one is caught. It raises while somebody types, because nothing else
    ends the wait for a line, and then once.

    While a model answers, the first press lets it finish its token. The next one, for those who wait long for a first
    token, stops it where its next module would compute.
    """

    def __init__(self) -> None:
        self.times, self.is_typing = 0, False

    def __call__(self) -> bool:
        """Whether to stop."""
        return self.times > 0

    def press(self, *_: Any) -> None:
        """Take a Ctrl-C."""
        self.times += 1
        if self.is_typing:
            self.is_typing = False
            raise KeyboardInterrupt

    @contextmanager
    def speaking(self) -> Iterator[None]:
        """Stop at once inside a `with` block if Ctrl-C is pressed again; afterwards no press is left over."""
        from torch.nn.modules.module import register_module_forward_pre_hook

        hook = register_module_forward_pre_hook(self._stop_at_once)
        try:
            yield
        finally:
            hook.remove()
            self.times = 0

    def _stop_at_once(self, *_: Any) -> None:
        if self.times > 1:
            raise StopAtOnce


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Take each Ctrl-C inside a `with` block, also where the program was started to ignore it; in the main thread."""
    interrupt = Interrupt()
    before = signal.signal(signal.SIGINT, interrupt.press)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
