"""What benchmarks that train share: runs that are kept as they end, and the sweep of a learning rate."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from benchmarks.records import append_line, read_lines

# learning rates of a sweep, a factor of about three apart
RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)


class Recorded(Protocol):
    """A run that has ended, which can be told from others and written down."""

    @property
    def key(self) -> Hashable:
        """Settings that no other run has."""
        ...

    def as_record(self) -> dict[str, Any]:
        """Return the run as JSON values."""
        ...


RunT = TypeVar("RunT", bound=Recorded)
AnyRun = TypeVar("AnyRun")


class Records(Generic[RunT]):
    """Runs by key, in a file that grows as they end; a run that the file holds is not run again."""

    def __init__(self, file: Path, parse: Callable[[dict[str, Any]], RunT], say: Callable[[RunT], None]) -> None:
        self.file, self.say = file, say
        self.runs = {run.key: run for run in map(parse, read_lines(file))}

    def get(self, key: Hashable, make: Callable[[], RunT]) -> RunT:
        """Return the run of a key; make and record it if there is none."""
        if key not in self.runs:
            made = make()
            append_line(self.file, made.as_record())
            self.runs[key] = made
            self.say(made)
        return self.runs[key]


def sweep(run_at: Callable[[float], AnyRun], rate: float, choose: Callable[[Collection[AnyRun]], AnyRun]) -> AnyRun:
    """Run at a rate and at its neighbours until the chosen run is not at the edge; return the chosen run.

    Args:
        run_at: Trains at a learning rate.
        rate: One of `RATES`, where the sweep begins.
        choose: Picks the best of some runs.
    """
    tried: dict[float, AnyRun] = {}
    wanted = neighbours(rate)
    while wanted - tried.keys():
        tried |= {rate: run_at(rate) for rate in sorted(wanted - tried.keys())}
        best = choose(tuple(tried.values()))
        wanted = neighbours(next(rate for rate, run in tried.items() if run is best))
    return best


def neighbours(rate: float, rates: Sequence[float] = RATES) -> set[float]:
    """Return a rate and those beside it."""
    index = rates.index(rate)
    return set(rates[max(0, index - 1) : index + 2])
