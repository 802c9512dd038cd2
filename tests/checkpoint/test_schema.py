"""Plain JSON values against type hints: what misfits is named with its place, what fits becomes the dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from scale_surgery.checkpoint.schema import build, in_one_line, known_misfits, misfits
from scale_surgery.fields import Range


@dataclass(frozen=True)
class Inner:
    name: str
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Outer:
    inner: Inner
    others: Mapping[str, Inner]
    pair: tuple[int, int]
    share: Annotated[float, Range(above=0, most=1)]
    kind: Literal["a", "b"]
    is_on: bool = False
    more: Any = None
    tags: tuple[str, ...] | None = None
    extra: Mapping[str, str] = field(default_factory=dict)


GOOD: dict[str, Any] = {
    "inner": {"name": "x", "sizes": [1, 2]},
    "others": {"o": {"name": "y"}},
    "pair": [1, 2],
    "share": 1,
    "kind": "a",
}


def test_what_fits_becomes_the_dataclass() -> None:
    assert list(misfits(GOOD, Outer)) == []
    assert build(GOOD, Outer) == Outer(Inner("x", (1, 2)), {"o": Inner("y")}, (1, 2), 1, "a")
    assert build(GOOD | {"tags": ["t"], "more": [1]}, Outer).tags == ("t",)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"inner": 3}, "inner is 3, expected an object"),
        ({"inner": {"name": 1}}, "inner.name is 1, expected a text"),
        ({"inner": {"name": "x", "sizes": [1, True]}}, "inner.sizes[1] is True, expected a whole number"),
        ({"inner": {}}, "inner.name is missing"),
        ({"inner": {"name": "x", "y": 1}}, "inner.y is unknown"),
        ({"others": {"o": None}}, "others.o is None, expected an object"),
        ({"pair": [1]}, "pair is [1], expected a list of 2"),
        ({"pair": [1, 2.0]}, "pair[1] is 2.0, expected a whole number"),
        ({"share": 0}, "share is 0, expected more than 0 and at most 1"),
        ({"share": "1"}, "share is '1', expected a number"),
        ({"share": True}, "share is True, expected a number"),
        ({"kind": "c"}, "kind is 'c', expected one of a, b"),
        ({"kind": ["a"]}, "kind is ['a'], expected one of a, b"),
        ({"is_on": 1}, "is_on is 1, expected true or false"),
        ({"tags": "t"}, "tags is 't', expected a list"),
        ({"extra": {"a": None}}, "extra.a is None, expected a text"),
    ],
)
def test_what_misfits_is_named_with_its_place(change: dict[str, Any], problem: str) -> None:
    assert list(misfits(GOOD | change, Outer)) == [problem]


def test_everything_is_listed_and_long_values_are_cut() -> None:
    problems = list(misfits({"inner": "x" * 999, "pair": [], "share": 2}, Outer))
    assert [problem.split()[0] for problem in problems] == ["inner", "others", "pair", "share", "kind"]
    assert len(problems[0]) < 120
    assert in_one_line([str(number) for number in range(20)]).endswith("; 11; ... and 8 more")


def test_known_keys_alone_are_looked_at_where_others_may_stand() -> None:
    assert list(known_misfits({"name": "x", "later": 1}, Inner)) == []
    assert list(known_misfits({"later": 1}, Inner)) == ["name is missing"]
    assert list(known_misfits([], Inner)) == ["it is [], expected an object"]
