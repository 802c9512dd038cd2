"""Tables of results that no test of a command looks at line by line."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from scale_surgery.checkpoint.files import plain_json
from scale_surgery.learning.learned import Learned, rows_of
from scale_surgery.learning.page import _facts
from scale_surgery.learning.tables import cells_of, render_learned
from scale_surgery.planning.new_tokens import NewTokens
from scale_surgery.running.learned_tokens import ChosenTokens, SavingToken
from scale_surgery.show.tables import format_bytes, format_count, render_chosen_tokens
from tests.conftest import shown

CHOSEN = ChosenTokens(
    new_tokens=NewTokens(("ĠStraÃŁe", "æĹ", "ĊĊ", "Donaudampfschifffahrtsgesellschaftskapitän")),
    wanted=4,
    characters=1_000_000,
    bytes=1_100_000,
    tokens_before=500_000,
    tokens_after={1: 480_000, 2: 410_000, 4: 250_000},
    most_saving=(
        SavingToken("ĠStraÃŁe", " Straße", 1234, 4),
        SavingToken("æĹ", "\ufffd", 100, 2),
        SavingToken("ĊĊ", "\n\n", 20, 2),
        SavingToken("x", "Donaudampfschifffahrtsgesellschaftskapitän", 1, 12),
    ),
)


def lines(chosen: ChosenTokens) -> list[str]:
    return [line.rstrip() for line in shown(render_chosen_tokens(chosen)).splitlines()]


def test_what_new_tokens_save() -> None:
    assert lines(CHOSEN) == [
        "new tokens  (on 1,000,000 characters, 1.1 MB)",
        "                       tokens  characters each  bytes each  saved",
        "the base's tokenizer  500,000             2.00        2.20",
        "with 1 new token      480,000             2.08        2.29   4.0%",
        "with 2 new tokens     410,000             2.44        2.68  18.0%",
        "with 4 new tokens     250,000             4.00        4.40  50.0%",
        "",
        "largest savings                             count  tokens before  saves",
        "·Straße                                     1,234              4  3,702",
        "⟨E6 97⟩                                       100              2    100",
        "↵↵                                             20              2     20",
        "Donaudampfschifffahrtsgesellschaftskapitän      1             12     11",
    ]


def test_fewer_tokens_than_were_asked_for_are_said() -> None:
    few = ChosenTokens(**{**vars(CHOSEN), "wanted": 4000})

    note = "note: 4 of 4,000; no other pair of tokens occurs twice in the text"
    assert lines(few) == [*lines(CHOSEN), note]
    assert max(map(len, lines(few))) <= 80


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (999, "999"),
        (999_499, "999 k"),
        (999_500, "1 M"),
        (999_499_999, "999 M"),
        (999_600_000, "1 B"),
        (1.56e12, "1.56 T"),
    ],
)
def test_a_count_has_three_digits_and_the_unit_of_what_is_printed(count: float, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(999, "999 B"), (999_949, "999.9 kB"), (999_950, "1.0 MB"), (999.96e9, "1.0 TB")]
)
def test_bytes_have_the_unit_of_what_is_printed(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_a_loss_that_is_not_finite_is_shown_as_it_reads_in_a_record() -> None:
    """JSON has no NaN, so the record of a job has its name."""
    scores = [
        {"name": "base", "kind": "base", "forgetting": None},
        {"name": "x", "kind": "expanded", "forgetting": math.nan},
    ]
    for score, loss in zip(scores, (math.inf, math.nan), strict=True):
        score["old"] = {"nats_per_token": loss, "accuracy": 0.5}
    rows = rows_of(plain_json({"scores": scores}), routed=False)
    made = {"path": Path("job"), "result": Path("job/learned"), "page": Path("job/learn.html"), "model": "base"}
    learned = Learned(
        **made,
        layers="1",
        parameters_added=10,
        router=None,
        rows=rows,
        verified=False,
        promises={},
        stages=(),
        seconds=1.0,
        warnings=(),
    )
    assert cells_of("old", learned) == [("base", "inf", "", "50.0%"), ("learned", "nan", "+nan", "50.0%")]
    assert next(fact.value for fact in _facts(learned)) == "+nan"
    assert re.search(r"learned +nan +\+nan +50\.0%", shown(render_learned(learned)))
