"""Tables of results that no test of a command looks at line by line."""

from __future__ import annotations

from scale_surgery.planning.new_tokens import NewTokens
from scale_surgery.running.learned_tokens import ChosenTokens, SavingToken
from scale_surgery.show.tables import render_chosen_tokens
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
        "saves most                                  stands  tokens before  saves",
        "·Straße                                      1,234              4  3,702",
        "⟨E6 97⟩                                        100              2    100",
        "↵↵                                              20              2     20",
        "Donaudampfschifffahrtsgesellschaftskapitän       1             12     11",
    ]


def test_fewer_tokens_than_were_asked_for_are_said() -> None:
    few = ChosenTokens(**{**vars(CHOSEN), "wanted": 4000})

    note = "note: 4 of 4,000; no other pair of tokens stands in the text twice"
    assert lines(few) == [*lines(CHOSEN), note]
    assert max(map(len, lines(few))) <= 80
