"""The mutation campaign: `make fuzz COUNT=10000 SEED=1`; one case again: `python -m tests.fuzz --seed 1 --only 7`."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from pathlib import Path

# before torch is imported: the same surroundings as those of the tests
import tests.conftest
from tests.fuzz import case
from tests.fuzz.campaign import findings, run_campaign, table
from tests.fuzz.seeds import make_seeds


def main() -> int:
    """Run what the command line asks for; gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="number of cases")
    parser.add_argument("--seed", type=int, default=1, help="with the number of a case it says all of it")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--only", type=int, help="run this case alone, and show where it failed")
    asked = parser.parse_args()
    assert tests.conftest.STORIES
    with tempfile.TemporaryDirectory(prefix="scale-surgery-seeds-") as folder:
        seeds = Path(folder)
        make_seeds(seeds)
        if asked.only is not None:
            return repeat(seeds, asked.seed, asked.only)
        return campaign(seeds, asked.seed, asked.count, asked.jobs)


def repeat(seeds: Path, seed: int, number: int) -> int:
    """One case, with the traceback of what it found."""
    original = case.FindingError.__init__

    def shown(self: case.FindingError, *about: str) -> None:
        traceback.print_exc()
        original(self, *about)

    case.FindingError.__init__ = shown  # type: ignore[method-assign]
    outcome = case.run_case(seeds, seed, number)
    print(outcome)
    return int(outcome.outcome == "finding")


def campaign(seeds: Path, seed: int, count: int, jobs: int) -> int:
    """All of them, counted."""
    begun, outcomes = time.monotonic(), []
    for outcome in run_campaign(seeds, seed, count, jobs):
        outcomes.append(outcome)
        if len(outcomes) % 500 == 0:
            print(f"{len(outcomes)} of {count} cases, {time.monotonic() - begun:.0f} s", file=sys.stderr)
    print(table(outcomes, "mutator"), table(outcomes, "operation"), findings(outcomes, seed), sep="\n\n")
    return int(any(outcome.outcome == "finding" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
