"""What a user may type for layers, and what the messages say when it is wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scale_surgery.errors import PlanError, Problem
from scale_surgery.planning.selection import format_layers, select_layers
from tests.conftest import problems


@pytest.mark.parametrize(
    ("text", "chosen"),
    (
        ("20-23", (20, 21, 22, 23)),
        ("7", (7,)),
        ("-1", (31,)),
        ("-3--1", (29, 30, 31)),
        ("8,0, 4", (0, 4, 8)),
        ("last:2", (30, 31)),
        ("every:16", (0, 16)),
        ("0,5-6,-1", (0, 5, 6, 31)),
        ("all", tuple(range(32))),
        ("0-31", tuple(range(32))),
    ),
)
def test_forms(text, chosen):
    assert select_layers(text, 32) == chosen


def out_of_range(layer: int, last: int = 31) -> Problem:
    return Problem("layer-out-of-range", layer=layer, last=last)


def unreadable(part: str) -> Problem:
    return Problem("layers-unreadable", part=part)


def pattern(word: str, count: int) -> Problem:
    return Problem("layer-pattern-out-of-range", word=word, count=count, layers=32)


@pytest.mark.parametrize(
    ("text", "problem"),
    (
        ("32", out_of_range(32)),
        ("-33", out_of_range(-33)),
        ("30-40", out_of_range(40)),
        ("9-4", Problem("layer-range-backwards", part="9-4")),
        ("1,2,1-3", Problem("layers-repeated", layers=[1, 2])),
        ("31,-1", Problem("layers-repeated", layers=[31])),
        ("last:0", pattern("last", 0)),
        ("every:33", pattern("every", 33)),
        ("", unreadable("")),
        ("1,,2", unreadable("")),
        ("top", unreadable("top")),
        ("1.5", unreadable("1.5")),
        ("last:-1", unreadable("last:-1")),
        ("9" * 5000, unreadable("9" * 5000)),
    ),
)
def test_what_is_wrong_is_said(text: str, problem: Problem) -> None:
    assert problems(select_layers, text, 32, error=PlanError) == [problem.within(f"--layers {text}")]


def test_all_problems_at_once() -> None:
    text, option = "40,1,1,5-2,x", "--collaborative-layers"
    wanted = (
        out_of_range(40, last=7),
        Problem("layer-range-backwards", part="5-2"),
        unreadable("x"),
        Problem("layers-repeated", layers=[1]),
    )
    found = problems(select_layers, text, 8, option, error=PlanError)
    assert found == [problem.within(f"{option} {text}") for problem in wanted]


@given(st.sets(st.integers(0, 40), min_size=1))
def test_what_is_written_short_is_understood(layers):
    assert (format_layers((3, 4, 5, 9)), format_layers(())) == ("3-5,9", "none")
    chosen = tuple(sorted(layers))
    assert select_layers(format_layers(chosen), 41) == chosen


@given(st.text(max_size=12))
def test_any_text_gives_layers_or_an_error_at_it(text):
    try:
        chosen = select_layers(text, 5)
    except PlanError as error:
        assert {problem.where for problem in error.problems} == {f"--layers {text}"}
    else:
        assert chosen
        assert set(chosen) <= set(range(5))
