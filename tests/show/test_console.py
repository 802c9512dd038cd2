"""What people see: units, tables that fit 80 columns, silence where nobody looks."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console, Group

from scale_surgery import Request, expand, inspect, strip, verify
from scale_surgery.checkpoint.expansions import nameless
from scale_surgery.show.console import Output
from scale_surgery.show.layout import Facts
from scale_surgery.show.tables import (
    format_bytes,
    format_count,
    format_seconds,
    render_expansion,
    render_inspection,
    render_stripped,
    render_warnings,
)
from scale_surgery.show.tables_plan import render_plan
from scale_surgery.show.tables_verify import render_verification
from tests.tiny import save_tiny


def shown(rendered: object, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(rendered)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("count", "text"), [(7, "7 B"), (163_008, "163.0 kB"), (16_060_522_496, "16.1 GB"), (3e12, "3.0 TB")]
)
def test_bytes(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_counts_and_durations() -> None:
    assert [format_count(n) for n in (12, 40_752, 1_235_814_400)] == ["12", "40.8 k", "1.24 B"]
    assert [format_seconds(s) for s in (0.2, 42, 600)] == ["under a second", "42 s", "10 min"]


def test_results_fit_80_columns_and_lose_nothing(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "llama")
    request = Request("1-2", variant="adapt")
    done = expand(base, request, tmp_path / "expanded")
    result = verify(done.path)
    texts = {
        "inspect": shown(render_inspection(inspect(done.path))),
        "plan": shown(render_plan(done.plan, details=True)),
        "expand": shown(render_expansion(done)),
        "verify": shown(render_verification(result)),
        "strip": shown(render_stripped(strip(done.path, tmp_path / "back"))),
    }
    for text in texts.values():
        assert max(map(len, text.splitlines())) <= 80
        assert "…" not in text
    joined = texts["plan"].replace("\n", "")
    assert all(nameless(tensor.name) in joined for tensor in done.plan.tensors)
    for expected in ("1-2  (2 of 3)", "1-2 (attn)", f"+{done.plan.costs.parameters_added:,}"):
        assert expected in texts["plan"]
    assert "not claimed" in texts["verify"] and "verified  adapt, untrained" in texts["verify"]


def test_progress_is_silent_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    out = Output()
    with out.track("hashing", 10) as advance:
        advance(10)
    out.warn("careful")
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


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
