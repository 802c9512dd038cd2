"""Tests that the default run leaves to `make test-slow`, so that it takes minutes: the longest ones of each file.

    python -m tests.long DURATIONS      writes long.txt; DURATIONS is what pytest printed with --durations=0 -vv

Of each file the shortest tests run by default, up to a budget of seconds; of the files in `WHOLE`, which hold the
promises, all tests do.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

LIST = Path(__file__).with_name("long.txt")
BUDGET = 3.0
WHOLE = (
    "tests/modeling/test_promises.py",
    "tests/folder/test_verbs_and_states.py",
    "tests/evidence/test_verify.py",
    "tests/surgery/test_expand.py",
    "tests/surgery/test_strip.py",
    "tests/surgery/test_interruptions.py",
    "tests/cli/test_program.py",
    "tests/test_problems.py",
    "tests/test_rooms.py",
    "tests/test_schemas.py",
)
LINE = re.compile(r"(\d+\.\d+)s (?:call|setup|teardown)\s+(tests/.+)")


def read_long() -> frozenset[str]:
    """Return the names of the long tests."""
    return frozenset(LIST.read_text(encoding="utf-8").splitlines())


def choose(seconds: Counter[str]) -> list[str]:
    """Return the tests that are beyond the budget of their file."""
    files: dict[str, list[str]] = defaultdict(list)
    for test in sorted(seconds, key=lambda test: seconds[test]):
        files[test.split("::")[0]].append(test)
    return sorted(
        test for file, tests in files.items() if not file.startswith(WHOLE) for test in _beyond(tests, seconds)
    )


def _beyond(tests: list[str], seconds: Counter[str]) -> list[str]:
    first, *rest = tests
    spent, beyond = seconds[first], []
    for test in rest:
        spent += seconds[test]
        if spent > BUDGET:
            beyond.append(test)
    return beyond


def main() -> None:
    """Write the list anew; what is long now and was not run keeps its place."""
    seconds: Counter[str] = Counter()
    for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines():
        if found := LINE.match(line):
            seconds[found[2].strip()] += float(found[1])
    kept = read_long() - seconds.keys() if LIST.exists() else frozenset()
    LIST.write_text("".join(f"{test}\n" for test in sorted({*choose(seconds), *kept})), encoding="utf-8")


if __name__ == "__main__":
    main()
