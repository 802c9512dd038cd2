"""A bounded part of `make torture`, and that it notices what does not hold."""

from __future__ import annotations

import shutil

import pytest

from tests.interrupted_steps import Disturbance
from tests.torture import VERBS, Torture, torture

# each takes a fraction of a second; what loads models is left to the long run
CHEAP = (
    *("expand --overwrite", "expand --method depth", "strip --overwrite", "route-export", "set_routing", "apply"),
    "adopt",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Torture:
    return Torture(tmp_path_factory.mktemp("torture"))


@pytest.mark.parametrize("count", (2, pytest.param(6, marks=pytest.mark.slow)))
def test_commands_that_are_killed_or_meet_errors(place, count):
    """A campaign of a fixed seed; `make torture` runs longer ones."""
    counts, problems = torture(place, count, 6, CHEAP)
    assert not problems
    assert sum(counts.values()) == count
    if count == 6:
        assert {kind for _, kind, _ in counts} == {"kill", "error"}, "of this seed, whatever the machine"
        assert {outcome for _, kind, outcome in counts if kind == "kill"} == {"killed"}


def test_a_kill_or_an_error_falls_at_the_call_that_was_chosen(place):
    counts, _ = place.whole("strip")
    assert place.disturb("strip", Disturbance("kill", 0)) == ("killed", [])
    assert place.disturb("strip", Disturbance("kill", counts["calls"] - 1)) == ("killed", [])
    assert place.disturb("strip", Disturbance("kill", counts["calls"])) == ("came to its end", [])
    # what is written first may fail: it is tried only
    assert place.disturb("strip", Disturbance("error", 1)) == ("stopped with an error", [])
    assert place.disturb("strip", Disturbance("error", counts["writes"])) == ("came to its end", [])


@pytest.mark.parametrize(
    ("spoil", "problem"),
    (
        (lambda place: (place / "in" / "narrow" / "new").write_text("x"), "an input was changed"),
        (lambda place: (place / "out" / "made.left").write_text("x"), "left beside the output: ['made.left']"),
        (lambda place: (place / "out" / "made" / "config.json").write_text("x"), "other bytes than"),
        (lambda place: shutil.rmtree(place / "out" / "made"), "other bytes than"),
    ),
)
def test_what_does_not_hold_is_noticed(place, spoil, problem):
    assert place.disturb("strip", Disturbance("kill", 0)) == ("killed", [])
    spoil(place.place)
    _, whole = place.whole("strip")
    problems = [*place._after(VERBS["strip"], "", None, whole), *place._at_the_end(whole)]
    assert any(problem in line for line in problems), problems
    (place.place / "in" / "narrow" / "new").unlink(missing_ok=True)
