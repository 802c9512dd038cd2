"""The list of long tests names tests that exist, and the rule that made it."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from tests import long

ROOT = Path(__file__).parents[1]


def test_each_long_test_exists() -> None:
    names = {name.partition("[")[0] for name in long.read_long()}
    assert names
    for file in sorted({name.split("::")[0] for name in names}):
        assert not file.startswith(long.WHOLE)
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert {name.split("::")[-1] for name in names if name.startswith(f"{file}::")} <= functions, file


def test_the_shortest_tests_of_a_file_stay_and_all_of_the_promises() -> None:
    few = {"tests/a.py::slow": 7.0, "tests/a.py::fast": 0.1, "tests/a.py::middle": 2.0, "tests/b.py::one": 60.0}
    promises = Counter({f"{long.WHOLE[0]}::{name}": 60.0 for name in ("one", "two")})
    assert long.choose(Counter(few) + promises) == ["tests/a.py::slow"]
