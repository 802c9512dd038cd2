"""Records against their types: what does not fit is named with its place, what fits becomes the dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from typing_extensions import TypedDict

from scale_surgery import CheckpointError, PlanError
from scale_surgery.checkpoint.records import open_record, read_record, reading
from scale_surgery.errors import in_one_line
from scale_surgery.fields import Range
from tests.conftest import refusal


@dataclass(frozen=True)
class Inner:
    name: str
    sizes: tuple[int, ...] = ()


@open_record
class Run(TypedDict, total=False):
    steps: int


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
    runs: tuple[Run, ...] = ()


GOOD: dict[str, Any] = {
    "inner": {"name": "x", "sizes": [1, 2]},
    "others": {"o": {"name": "y"}},
    "pair": [1, 2],
    "share": 1,
    "kind": "a",
}


def test_what_fits_becomes_the_dataclass() -> None:
    assert read_record(GOOD, Outer) == Outer(Inner("x", (1, 2)), {"o": Inner("y")}, (1, 2), 1, "a")
    assert read_record(GOOD | {"tags": ["t"], "more": [1, float("inf")]}, Outer).tags == ("t",)
    runs = [{"steps": 3, "later": [10**30]}, {}]
    assert list(read_record(GOOD | {"runs": runs}, Outer).runs) == runs, "an open record keeps what it does not name"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"inner": 3}, "inner is 3, expected an object"),
        ({"inner": {"name": 1}}, "inner.name is 1, expected a text"),
        ({"inner": {"name": "x", "sizes": [1, True]}}, "inner.sizes[1] is True, expected a whole number"),
        ({"inner": {}}, "inner.name is missing"),
        ({"inner": {"name": "x", "y": 1}}, "inner.y is unknown"),
        ({"others": {"o": None}}, "others.o is None, expected an object"),
        ({"pair": [1]}, "pair[1] is missing"),
        ({"pair": [1, 2, 3]}, "pair is [1, 2, 3], expected fewer values"),
        ({"pair": [1, 2.0]}, "pair[1] is 2.0, expected a whole number"),
        ({"share": 0}, "share is 0, expected more than 0 and at most 1"),
        ({"share": "1"}, "share is '1', expected a number"),
        ({"share": True}, "share is True, expected a number"),
        ({"share": float("nan")}, "share is nan, expected a finite number"),
        ({"kind": "c"}, "kind is 'c', expected 'a' or 'b'"),
        ({"kind": ["a"]}, "kind is ['a'], expected 'a' or 'b'"),
        ({"is_on": 1}, "is_on is 1, expected true or false"),
        ({"tags": "t"}, "tags is 't', expected a list"),
        ({"extra": {"a": None}}, "extra.a is None, expected a text"),
        ({"runs": [{}, {"steps": "many"}]}, "runs[1].steps is 'many', expected a whole number"),
    ],
)
def test_what_does_not_fit_is_named_with_its_place(change: dict[str, Any], problem: str) -> None:
    assert refusal(read_record, GOOD | change, Outer, error=ValueError) == problem
    assert refusal(read_record, GOOD | change, Outer, "plan.json", error=ValueError) == f"plan.json.{problem}"


def test_everything_is_listed_and_long_values_are_cut() -> None:
    message = refusal(read_record, {"inner": "x" * 999, "pair": 10**40, "share": 2}, Outer, error=ValueError)
    problems = message.split("; ")
    assert [problem.split()[0] for problem in problems] == ["inner", "others", "pair", "share", "kind"]
    assert len(problems[0]) < 120
    with pytest.raises(ValueError, match=r"^it is \[\], expected an object$"):
        read_record([], Inner)
    assert in_one_line([str(number) for number in range(20)]).endswith("; 11; ... and 8 more")


def test_the_file_is_named_unless_another_is() -> None:
    for error in (ValueError("a is missing"), PlanError("a is missing")):
        with pytest.raises(CheckpointError) as refused, reading(Path("x.json")):
            raise error
        assert str(refused.value) == "x.json: is incomplete (a is missing). Restore it from where you got it."
    with pytest.raises(CheckpointError, match=r"^y\.json: no$"), reading(Path("x.json")):
        raise CheckpointError("y.json: no")
