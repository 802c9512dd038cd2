"""Lines of a log: the events that move a progress bar, for a stderr that is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from scale_surgery.progress import Finding, Progress, Steps

# least seconds from a line to the next; stages of a job and findings do not wait
INTERVAL = 30.0


class LogLines:
    """Writes lines with the time of day in front: what is done, how far it is, and what was measured.

    Args:
        write: Writes one line.
        clock: Gives seconds that only grow.
    """

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.write, self.clock = write, clock
        # a command that ends within the interval has no line
        self.written = clock()

    def line(self, *parts: str) -> None:
        """Write a line."""
        self.written = self.clock()
        self.write("  ".join([time.strftime("%H:%M:%S"), *filter(None, parts)]))

    @contextmanager
    def track(self, label: str, total: int) -> Iterator[Progress]:
        """Write how far some work is, and give a function that is told."""
        work = Work(total, self.clock())
        # a training says itself when it begins, and where an earlier run ended
        if self._is_due() and not isinstance(total, Steps):
            self.line(label, work.position)

        def report(advance: int, note: str = "") -> None:
            work.add(advance, self.clock())
            if isinstance(note, Finding) or self._is_due():
                self.line(label, work.position, note, work.take_rate(), work.left)

        yield report

    def _is_due(self) -> bool:
        return self.clock() - self.written >= INTERVAL


class Work:
    """How far some work is, and how fast."""

    def __init__(self, total: int, now: float) -> None:
        self.total, self.done, self.latest = total, 0, now
        # when, and with how much done, the work that is clocked began
        self.start: tuple[float, int] | None = None
        # amount and seconds since the last line, without those of measurements
        self.amount, self.seconds = 0, 0.0
        self.rate = ""

    def add(self, advance: int, now: float) -> None:
        """Add what was just done."""
        self.done += advance
        if self.start is None or self.done == self.start[1]:
            # an earlier run may have done what the first report tells of; a measurement before a step is part of none
            self.start = (now, self.done)
        elif advance:
            self.amount += advance
            self.seconds += now - self.latest
        self.latest = now

    @property
    def position(self) -> str:
        """How much is done: steps of how many, or a share."""
        if isinstance(self.total, Steps):
            return f"step {self.done} of {self.total}"
        return f"{min(100, 100 * self.done // max(1, self.total))} %"

    def take_rate(self) -> str:
        """Tokens a second since it was last asked, or as they were before where nothing was done since."""
        if isinstance(self.total, Steps) and self.amount and self.seconds > 0:
            self.rate = f"{self.total.tokens * self.amount / self.total / self.seconds:,.0f} tokens/s"
        self.amount, self.seconds = 0, 0.0
        return self.rate

    @property
    def left(self) -> str:
        """Time left at the mean speed of this run, measurements and checkpoints included; empty before it is known."""
        if self.start is None:
            return ""
        began, before = self.start
        if not before < self.done < self.total:
            return ""
        seconds = (self.latest - began) / (self.done - before) * (self.total - self.done)
        return f"{format_left(seconds)} left"


def format_left(seconds: float) -> str:
    """Write a time to wait: seconds, minutes, or hours and minutes."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
