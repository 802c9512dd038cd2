"""Many cases in several processes, and what came of them.

A process that dies takes its case with it as a finding, and another takes its place.
"""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tests.fuzz.case import SECONDS, Outcome, run_case

PROCESSES = multiprocessing.get_context("spawn")
# of an alarm that does not come through, as in a long call into C
PATIENCE = 5 * SECONDS


def work(seeds: Path, seed: int, numbers: Sequence[int], results: Connection) -> None:
    """Run cases one after the other; says which one begins, so that a death has a name."""
    warnings.simplefilter("ignore")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)
    for number in numbers:
        results.send(number)
        results.send(_run(seeds, seed, number))
    results.close()


def _run(seeds: Path, seed: int, number: int) -> Outcome:
    try:
        return run_case(seeds, seed, number)
    except Exception as error:  # of the campaign's own code: it has to be seen, and ends no process
        return Outcome(number, "?", "?", "finding", "", "the campaign failed", f"{type(error).__name__}: {error}"[:100])


class Worker:
    """A process, the cases that it has still to run, and the one that it runs."""

    def __init__(self, seeds: Path, seed: int, numbers: Sequence[int]) -> None:
        self.seeds, self.seed, self.left, self.current = seeds, seed, list(numbers), -1
        self._start()

    def _start(self) -> None:
        self.results, sending = PROCESSES.Pipe(duplex=False)
        self.process = PROCESSES.Process(target=work, args=(self.seeds, self.seed, tuple(self.left), sending))
        self.process.start()
        sending.close()

    def receive(self) -> Outcome | None:
        """What it says next; a death is a finding, and begins a new process."""
        try:
            message = self.results.recv()
        except EOFError:
            self.process.join(1)
            return self.bury("crash")
        if isinstance(message, Outcome):
            self.left.remove(message.number)
            return message
        self.current = message
        return None

    def bury(self, kind: str) -> Outcome | None:
        """End a process that died or hangs; gives what its case then is."""
        self.process.kill()
        self.process.join()
        self.results.close()
        if not self.left:
            return None
        number = self.current if self.current in self.left else self.left[0]
        self.left.remove(number)
        code = str(self.process.exitcode)
        if self.left:
            self._start()
        return Outcome(number, "?", "?", "finding", "", kind, code)


def run_campaign(seeds: Path, seed: int, count: int, jobs: int) -> Iterator[Outcome]:
    """Run the cases 0 to `count`, those of one process every `jobs`-th, and give what came of each."""
    workers = [Worker(seeds, seed, range(first, count, jobs)) for first in range(min(jobs, count))]
    while workers:
        ready = wait([worker.results for worker in workers], timeout=PATIENCE)
        for worker in list(workers):
            outcome = worker.receive() if worker.results in ready else None if ready else worker.bury("hangs")
            if outcome is not None:
                yield outcome
            if not worker.left:
                worker.process.join()
                workers.remove(worker)


def table(outcomes: Sequence[Outcome], column: str) -> str:
    """Counts of refused, accepted and findings, by mutator or by operation."""
    counts = Counter((getattr(outcome, column), outcome.outcome) for outcome in outcomes)
    kinds = ("refused", "accepted", "finding")
    rows = [(name, *(counts[name, kind] for kind in kinds)) for name in sorted({name for name, _ in counts})]
    rows.append(("all", *(sum(row[place] for row in rows) for place in (1, 2, 3))))
    lines = [f"{column:26}" + "".join(f"{kind:>10}" for kind in kinds)]
    return "\n".join([*lines, *(f"{row[0]:26}" + "".join(f"{count:>10}" for count in row[1:]) for row in rows)])


def findings(outcomes: Sequence[Outcome], seed: int) -> str:
    """Each distinct finding, how often it was met, and how its first case is repeated."""
    met: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in sorted(outcomes, key=lambda outcome: outcome.number):
        if outcome.outcome == "finding":
            met.setdefault((outcome.kind, outcome.key), []).append(outcome)
    lines = []
    for (kind, key), cases in sorted(met.items()):
        first = cases[0]
        lines += [
            f"{kind}: {key!r} ({len(cases)} times, {len({case.operation for case in cases})} operations)",
            f"    {first.operation}; {first.did[:200]!r}; {first.detail[:300]!r}",
            f"    python -m tests.fuzz --seed {seed} --only {first.number}",
        ]
    return "\n".join([*lines, f"{len(met)} distinct findings"])
