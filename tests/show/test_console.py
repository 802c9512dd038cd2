"""What people see: units, tables that fit 80 columns, silence where nobody looks."""

from __future__ import annotations

import pytest
from rich.console import Group

from scale_surgery import Probes, verify
from scale_surgery.checkpoint.expansions import nameless
from scale_surgery.show.console import Output
from scale_surgery.show.layout import Facts
from scale_surgery.show.tables import (
    format_bytes,
    format_count,
    format_seconds,
    render_warnings,
)
from scale_surgery.show.tables_plan import render_plan
from scale_surgery.show.tables_verify import render_verification
from tests.conftest import Pair, shown


def test_numbers_and_units() -> None:
    sizes = {7: "7 B", 163_008: "163.0 kB", 16_060_522_496: "16.1 GB", 3e12: "3.0 TB"}
    assert [format_bytes(count) for count in sizes] == list(sizes.values())
    assert [format_count(n) for n in (12, 40_752, 1_235_814_400)] == ["12", "40.8 k", "1.24 B"]
    assert [format_seconds(s) for s in (0.2, 42, 600)] == ["under a second", "42 s", "10 min"]


def test_tables_lose_nothing(llama: Pair) -> None:
    """Every command is shown in test_eighty_columns; here the longest table, and what verify says of a promise."""
    plan = llama.expansion.plan
    text = shown(render_plan(plan, details=True))
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    assert all(nameless(tensor.name) in text.replace("\n", "") for tensor in plan.tensors)
    assert "1-2  (2 of 3)" in text and f"+{plan.costs.parameters_added:,}" in text
    text = shown(render_verification(verify(llama.path, probes=Probes(max_new_tokens=0), record=False)))
    assert "not claimed" in text and "verified  preserve, untrained" in text


def test_short_work_is_silent_without_a_terminal_and_a_warning_is_not(capfd: pytest.CaptureFixture[str]) -> None:
    out = Output()
    with out.track("hashing", 10) as advance:
        advance(10)
    out.warn("careful")
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "warning: careful\n")


def test_quiet_keeps_errors(capfd: pytest.CaptureFixture[str]) -> None:
    out = Output(quiet=True)
    out.warn("careful")
    out.fail("broken [not markup]")
    assert capfd.readouterr().err == "error: broken [not markup]\n"


def test_quiet_leaves_warnings_out_of_a_result(capfd: pytest.CaptureFixture[str]) -> None:
    result = Group(Facts("trained", [("steps", "1")]), *render_warnings(("hardly fell", "[odd] name")), Facts("", []))
    Output().show(None, result)
    assert capfd.readouterr().out == "trained\nsteps  1\nwarning: hardly fell\nwarning: [odd] name\n"
    Output(quiet=True).show(None, result)
    assert capfd.readouterr().out == "trained\nsteps  1\n"


def test_brackets_in_names_are_no_markup(capfd):
    out = Output()
    out.show(None, Facts("m [old]", [("[b]", "odd [/k] name")]))
    out.say("written to [i]x.html")
    assert capfd.readouterr().out.split() == ["m", "[old]", "[b]", "odd", "[/k]", "name", "written", "to", "[i]x.html"]
