"""What files hold is shown as text: it moves no cursor, turns no direction, begins no line and is no markup."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import sys
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from scale_surgery.drawing.figures import image_of, save_figure
from scale_surgery.errors import CheckpointError, Problem
from scale_surgery.evidence.report import report
from scale_surgery.planning.request import Request
from scale_surgery.progress import Finding
from scale_surgery.show.console import Output
from scale_surgery.show.layout import Facts, NamedRows, PlainTable
from scale_surgery.show.pages import filling as pages
from scale_surgery.show.pages.report import write_page
from scale_surgery.surgery.expand import expand
from scale_surgery.surgery.strip import Stripped
from scale_surgery.visible import visible_line, visible_text
from tests.command import run
from tests.conftest import edited, name_base

# escapes, a title for the window, C1, a mark that turns the direction, half of a character, markup, line breaks
HOSTILE = "a\x1b[2J\x1b]0;b\x07\x9b31m\u202eb[bold]c\ud800\r\x7f\u2028\nforged  line"
# of the same, what a file system takes as a name
FOLDER = "a\x1b[2J\x07\x9b31m\u202eb[bold]c\r\nforged  line"
KINDS = ("Cc", "Cf", "Cs", "Zl", "Zp")


def hidden(text: str) -> list[str]:
    """Characters that a terminal would not show, and line breaks that a name brought."""
    forged = re.findall(r"(?m)^forged", text)
    return [character for character in text if character != "\n" and unicodedata.category(character) in KINDS] + forged


@pytest.fixture(scope="module")
def spoiled(base_of, tmp_path_factory) -> Path:
    """An expanded model whose folder and base have hostile names."""
    place = tmp_path_factory.mktemp("hostile")
    base = Path(shutil.copytree(base_of("llama"), place / f"base {FOLDER}"))
    path = expand(base, Request("1", variant="adapt"), place / FOLDER).path
    # a record with half of a character is refused
    name = HOSTILE.replace("\ud800", "")
    with edited(path / "surgery.json") as record:
        record["left_out"] = [f"{name}.bin"]
    name_base(path, name, name)
    return path


def test_what_is_hidden_is_found():
    assert set(hidden(HOSTILE)) == {"\x1b", "\x07", "\x9b", "\u202e", "\ud800", "\r", "\x7f", "\u2028", "forged"}


@given(st.text(st.characters(exclude_categories=())))
def test_nothing_of_a_text_is_hidden(text):
    shown = visible_text(text)
    assert [character for character in hidden(shown) if character not in ("\u200c", "\u200d", "forged")] == []
    assert shown.count("\n") == text.count("\n") and "\n" not in visible_line(text)
    shown.encode("utf-8")


@given(st.text(st.characters(categories=("L", "N", "P", "S"))))
def test_a_text_that_can_be_seen_stays(text):
    assert visible_text(text) == text == visible_line(text)


@pytest.mark.parametrize("thing", (HOSTILE, Facts(HOSTILE, [(HOSTILE, HOSTILE), ("next", HOSTILE)])))
def test_the_console_shows_it(thing, capfd):
    out = Output()
    out.show(None, thing)
    out.say(thing)
    out.warn(HOSTILE)
    out.fail(HOSTILE, HOSTILE)
    shown = "".join(capfd.readouterr())
    assert [character for character in hidden(shown) if character != "forged"] == []
    assert "␛" in shown and "⟨U+202E⟩" in shown and "[bold]" in shown and "⟨U+D800⟩" in shown
    assert isinstance(thing, str) or "forged" not in hidden(shown)


def test_tables_show_it(capfd):
    table, rows = PlainTable(HOSTILE), NamedRows([HOSTILE])
    table.add_column("name", overflow="fold")
    table.add_row(HOSTILE)
    rows.add_row(HOSTILE, "1")
    Output().show(None, table)
    Output().show(None, rows)
    assert hidden(capfd.readouterr().out) == []


def test_json_and_lines_of_an_error_mean_the_same(capfd):
    Output(as_json=True).show(Stripped(Path(), HOSTILE, {}, ()), "")
    text = capfd.readouterr().out
    assert hidden(text) == [] and text.isascii() and json.loads(text)["base_name"] == HOSTILE
    error = CheckpointError(Problem("folder-is-file", HOSTILE), Problem("weights-empty", "two"))
    assert HOSTILE in str(error), "in Python a text is what it is"
    Output().fail(*error.lines)
    shown = capfd.readouterr().err
    assert hidden(shown) == [] and len(shown.splitlines()) == 2 and "\ntwo: " in shown


@pytest.mark.parametrize("verb", (["inspect"], ["verify", "--files-only"], ["report", "--files-only"], ["push"]))
def test_commands_show_names_of_files(verb, spoiled):
    more = {"push": ["me/it", "--dry-run", "--no-verify"], "report": ["-o", spoiled.parent / "page.html"]}
    code = 1 if verb == ["push"] else 0
    shown = run(*verb, spoiled, *more.get(verb[0], []), code=code).output
    assert hidden(shown) == []


def test_what_is_written_shows_them(spoiled, tmp_path):
    for verb, more in (("strip", []), ("extract", []), ("route-export", []), ("merge", ["--max-new-tokens", 0])):
        assert hidden(run(verb, spoiled, "-o", tmp_path / f"{verb} {FOLDER}", *more).output) == []


def test_errors_and_usage_show_them(base_of, tmp_path):
    base = Path(shutil.copytree(base_of("llama"), tmp_path / FOLDER))
    with edited(base / "config.json") as config:
        config["model_type"] = HOSTILE
    for arguments, code in (
        (["inspect", base], 1),
        (["inspect", base, "--debug"], 1),
        (["plan", base, "--layers", FOLDER], 1),
        (["plan", base, "--layers", "0", "--variant", HOSTILE], 2),
        ([f"in{FOLDER}"], 2),
        (["inspect", base, HOSTILE], 2),
        ([f"--{FOLDER}"], 2),
    ):
        characters = [character for character in hidden(run(*arguments, code=code).output) if character != "forged"]
        assert characters == [], arguments


def test_progress_shows_notes(monkeypatch, capfd):
    monkeypatch.setenv("FORCE_COLOR", "1")
    for is_terminal in (True, False):
        monkeypatch.setattr(sys.stderr, "isatty", lambda there=is_terminal: there)
        with Output().track(HOSTILE, 2) as advance:
            advance(1, Finding(HOSTILE))
            advance(1, HOSTILE)
        shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]|\r", "", capfd.readouterr().err)  # what rich itself writes
        assert "␛[2J" in shown and hidden(shown) == []


def test_half_a_character_of_a_record_is_refused_and_that_of_a_folder_is_shown(spoiled, tmp_path):
    # Python takes a byte that is no UTF-8 for half a character
    folder = Path(shutil.copytree(spoiled, tmp_path / os.fsdecode(b"latin-\xed")))
    shown = run("inspect", folder).output
    assert r"latin-\udced" in shown and hidden(shown) == []
    with edited(folder / "surgery.json") as record:
        record["base_name"] = HOSTILE
    for verb in (["inspect"], ["verify", "--files-only"], ["report", "--files-only"]):
        shown = run(*verb, folder, code=1).output
        assert "it holds half a character, '\\ud800', expected Unicode text" in shown
        assert hidden(shown) == [] and len(shown.splitlines()) == 1


def test_pages_show_it(spoiled, tmp_path):
    page = tmp_path / "report.html"
    run("report", spoiled, "--files-only", "-o", page)
    text = page.read_text(encoding="utf-8")
    assert hidden(text) == [] and "⟨U+202E⟩" in text and "[bold]" in text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "_shown", lambda value: value)
        run("report", spoiled, "--files-only", "-o", page)
        assert {"\x1b", "\u202e"} <= set(hidden(page.read_text(encoding="utf-8")))
    write_page(replace(report(spoiled, files_only=True), base_name=HOSTILE), page)
    text = page.read_text(encoding="utf-8")
    assert hidden(text) == [] and "⟨U+D800⟩" in text


@pytest.mark.filterwarnings("ignore:Glyph")
def test_figures_show_it(tmp_path):
    figure = Figure()
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], label=HOSTILE)
    axes.set_title(HOSTILE)
    axes.legend()
    save_figure(figure, tmp_path / "figure.png")
    assert hidden(axes.get_title().replace("\nforged", "")) == []
    svg = base64.b64decode(image_of(figure).partition(",")[2]).decode()
    assert "⟨U+202E⟩" in svg and [character for character in hidden(svg) if character != "forged"] == []
