"""Ctrl-C in a conversation: it discards a line or stops an answer, and never ends the program."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class StopAtOnce(KeyboardInterrupt):
    """A request to stop an answer without waiting for its next token."""


class Interrupt:
    """A counter of Ctrl-C since typing began, or since an answer ended.

    A signal handler runs between any two steps of a program. An exception there could leave half a line printed, or
    escape the code that catches it. So the handler only counts. Exception: it raises once while the user types, because
    nothing else ends the wait for a line.

    While a model answers, the first press lets it finish its token. The first token may take long, so a second press
    stops the model at its next module.
    """

    def __init__(self) -> None:
        self.times, self.is_typing = 0, False

    def __call__(self) -> bool:
        """Return True if the answer should stop."""
        return self.times > 0

    def press(self, *_: Any) -> None:
        """Handle a Ctrl-C."""
        self.times += 1
        if self.is_typing:
            self.is_typing = False
            raise KeyboardInterrupt

    @contextmanager
    def speaking(self) -> Iterator[None]:
        """Stop at once inside a `with` block if Ctrl-C is pressed again; reset the counter at its end."""
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
    """Handle each Ctrl-C inside a `with` block, even if the program was started to ignore it; main thread only."""
    interrupt = Interrupt()
    # SIGTERM, which other commands handle like Ctrl-C, ends a conversation
    handlers: dict[int, Any] = {signal.SIGINT: interrupt.press, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
