"""What a user may type for layers, and what the messages say when it is wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scale_surgery.errors import PlanError
from scale_surgery.planning.selection import LAYER_FORMS, format_layers, select_layers
from tests.conftest import refusal


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


@pytest.mark.parametrize(
    ("text", "message"),
    (
        ("32", "--layers 32: layer 32 is out of range, the model has layers 0 to 31."),
        ("-33", "--layers -33: layer -33 is out of range, the model has layers 0 to 31."),
        ("30-40", "--layers 30-40: layer 40 is out of range, the model has layers 0 to 31."),
        ("9-4", "--layers 9-4: the range 9-4 runs backwards, expected the lower layer first."),
        ("1,2,1-3", "--layers 1,2,1-3: names layer 1, 2 twice. Name each layer once."),
        ("31,-1", "--layers 31,-1: names layer 31 twice. Name each layer once."),
        ("last:0", "--layers last:0: last:0 needs a number from 1 to 32, the model's layers."),
        ("every:33", "--layers every:33: every:33 needs a number from 1 to 32, the model's layers."),
        ("", f"--layers : '' is not a layer selection. Forms: {LAYER_FORMS}."),
        ("1,,2", f"--layers 1,,2: '' is not a layer selection. Forms: {LAYER_FORMS}."),
        ("top", f"--layers top: 'top' is not a layer selection. Forms: {LAYER_FORMS}."),
        ("1.5", f"--layers 1.5: '1.5' is not a layer selection. Forms: {LAYER_FORMS}."),
        ("last:-1", f"--layers last:-1: 'last:-1' is not a layer selection. Forms: {LAYER_FORMS}."),
    ),
)
def test_what_is_wrong_is_said(text, message):
    assert refusal(select_layers, text, 32, error=PlanError) == message


def test_all_problems_at_once():
    lines = refusal(select_layers, "40,1,1,5-2,x", 8, "--collaborative-layers", error=PlanError).splitlines()
    assert [line.partition(": ")[2].split(",")[0] for line in lines] == [
        "layer 40 is out of range",
        "the range 5-2 runs backwards",
        "'x' is not a layer selection. Forms: 20-31 (inclusive)",
        "names layer 1 twice. Name each layer once.",
    ]
    assert all(line.startswith("--collaborative-layers 40,1,1,5-2,x: ") for line in lines)


@given(st.sets(st.integers(0, 40), min_size=1))
def test_what_is_written_short_is_understood(layers):
    assert (format_layers((3, 4, 5, 9)), format_layers(())) == ("3-5,9", "none")
    chosen = tuple(sorted(layers))
    assert select_layers(format_layers(chosen), 41) == chosen


@given(st.text(max_size=12))
def test_any_text_gives_layers_or_an_error_that_quotes_it(text):
    try:
        chosen = select_layers(text, 5)
    except PlanError as error:
        assert text in str(error) or repr(text) in str(error)
    else:
        assert chosen
        assert set(chosen) <= set(range(5))
