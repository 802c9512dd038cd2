"""Log lines in place of a progress bar, if stderr is not a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from scale_surgery.progress import Finding, Progress, Steps

# least seconds between lines; stages of a job and findings are written at once
INTERVAL = 30.0


class LogLines:
    """A writer of log lines with the time of day: work, progress and measurements.

    Args:
        write: Writes a line.
        clock: Returns seconds from a monotonic clock.
    """

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.write, self.clock = write, clock
        # a command that ends within the interval writes no line
        self.written = clock()

    def line(self, *parts: str) -> None:
        """Write a line."""
        self.written = self.clock()
        self.write("  ".join([time.strftime("%H:%M:%S"), *filter(None, parts)]))

    @contextmanager
    def track(self, label: str, total: int) -> Iterator[Progress]:
        """Log the progress of some work, and yield the function that receives it."""
        work = Work(total, self.clock())
        # a training logs its own start, and the step at which it resumes
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
    """The progress and the speed of some work."""

    def __init__(self, total: int, now: float) -> None:
        self.total, self.done, self.latest = total, 0, now
        # time and finished amount at the start of the timed work
        self.start: tuple[float, int] | None = None
        # amount and seconds since the last line, without measurements
        self.amount, self.seconds = 0, 0.0
        self.rate = ""

    def add(self, advance: int, now: float) -> None:
        """Add a finished amount."""
        self.done += advance
        if self.start is None or self.done == self.start[1]:
            # the first report may include steps of an earlier run, so timing starts after it
            self.start = (now, self.done)
        elif advance:
            self.amount += advance
            self.seconds += now - self.latest
        self.latest = now

    @property
    def position(self) -> str:
        """The finished part: steps of all steps, or a share."""
        if isinstance(self.total, Steps):
            return f"step {self.done} of {self.total}"
        return f"{min(100, 100 * self.done // max(1, self.total))} %"

    def take_rate(self) -> str:
        """Return tokens per second since the last call, or the previous rate if nothing was done since."""
        if isinstance(self.total, Steps) and self.amount and self.seconds > 0:
            self.rate = f"{self.total.tokens * self.amount / self.total / self.seconds:,.0f} tokens/s"
        self.amount, self.seconds = 0, 0.0
        return self.rate

    @property
    def left(self) -> str:
        """Time left at the mean speed of this run, with measurements and checkpoints; empty if it is unknown."""
        if self.start is None:
            return ""
        began, before = self.start
        if not before < self.done < self.total:
            return ""
        seconds = (self.latest - began) / (self.done - before) * (self.total - self.done)
        return f"{format_left(seconds)} left"


def format_left(seconds: float) -> str:
    """Format a time to wait: seconds, minutes, or hours and minutes."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
