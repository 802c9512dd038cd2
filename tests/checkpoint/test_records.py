"""Records against their types: what does not fit is named with its place, what fits becomes the dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from typing_extensions import TypedDict

from scale_surgery import CheckpointError, PlanError
from scale_surgery.checkpoint.records import RecordError, open_record, read_record, reading
from scale_surgery.errors import Problem, in_one_line
from scale_surgery.fields import Range
from tests.conftest import problems, refused


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


def unfit(place: str, value: str, kind: str) -> Problem:
    return Problem("value-unfit", place, value=value, kind=kind)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"inner": 3}, unfit("inner", "3", "an object")),
        ({"inner": {"name": 1}}, unfit("inner.name", "1", "a text")),
        ({"inner": {"name": "x", "sizes": [1, True]}}, unfit("inner.sizes[1]", "True", "a whole number")),
        ({"inner": {}}, Problem("key-missing", "inner.name")),
        ({"inner": {"name": "x", "y": 1}}, Problem("key-unknown", "inner.y")),
        ({"others": {"o": None}}, unfit("others.o", "None", "an object")),
        ({"pair": [1]}, Problem("key-missing", "pair[1]")),
        ({"pair": [1, 2, 3]}, unfit("pair", "[1, 2, 3]", "fewer values")),
        ({"pair": [1, 2.0]}, unfit("pair[1]", "2.0", "a whole number")),
        ({"share": 0}, unfit("share", "0", "more than 0 and at most 1")),
        ({"share": "1"}, unfit("share", "'1'", "a number")),
        ({"share": True}, unfit("share", "True", "a number")),
        ({"share": float("nan")}, unfit("share", "nan", "a finite number")),
        ({"kind": "c"}, unfit("kind", "'c'", "'a' or 'b'")),
        ({"kind": ["a"]}, unfit("kind", "['a']", "'a' or 'b'")),
        ({"is_on": 1}, unfit("is_on", "1", "true or false")),
        ({"tags": "t"}, unfit("tags", "'t'", "a list")),
        ({"extra": {"a": None}}, unfit("extra.a", "None", "a text")),
        ({"runs": [{}, {"steps": "many"}]}, unfit("runs[1].steps", "'many'", "a whole number")),
    ],
)
def test_what_does_not_fit_is_named_with_its_place(change: dict[str, Any], problem: Problem) -> None:
    assert problems(read_record, GOOD | change, Outer, error=RecordError) == [problem]
    inside = Problem(problem.code, f"plan.json.{problem.where}", **problem.values)
    assert problems(read_record, GOOD | change, Outer, "plan.json", error=RecordError) == [inside]


def test_everything_is_listed_and_long_values_are_cut() -> None:
    found = problems(read_record, {"inner": "x" * 999, "pair": 10**40, "share": 2}, Outer, error=RecordError)
    assert [problem.where for problem in found] == ["inner", "others", "pair", "share", "kind"]
    assert [problem.code for problem in found] == ["value-unfit", "key-missing", *["value-unfit"] * 2, "key-missing"]
    assert len(found[0].values["value"]) < 120
    assert problems(read_record, [], Inner, error=RecordError) == [unfit("it", "[]", "an object")]
    with pytest.raises(ValueError, match=r"^it is \[\], expected an object$"):
        read_record([], Inner)
    assert in_one_line([str(number) for number in range(20)]).endswith("; 11; ... and 8 more")


def test_the_file_is_named_unless_another_is() -> None:
    missing = Problem("key-missing", "a")
    for error in (RecordError(missing), PlanError(missing)):
        with pytest.raises(CheckpointError) as caught, reading(Path("x.json")):
            raise error
        assert caught.value.problems == (Problem("record-incomplete", "x.json", missing),)
    with pytest.raises(CheckpointError) as caught, reading(Path("x.json")):
        raise KeyError("a")
    assert caught.value.problems[0].details == (Problem("other-program", error="'a'"),)
    with refused("json-missing", "y.json", CheckpointError), reading(Path("x.json")):
        raise CheckpointError(Problem("json-missing", "y.json"))
