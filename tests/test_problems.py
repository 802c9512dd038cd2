"""The words of problems: one listing, in which every code is used and every use fits, as approved in `problems.txt`."""

from __future__ import annotations

import ast
import json
import pickle
import re
import string
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from scale_surgery.checkpoint.forms import Form, refuse_form
from scale_surgery.errors import LISTING, CheckpointError, Problem, problems_of, render
from tests.command import run

PACKAGE, APPROVED = LISTING.parent, Path(__file__).with_name("problems.txt")
WORDS: dict[str, dict[str, str]] = tomllib.loads(LISTING.read_text(encoding="utf-8"))


class Named:
    """A value that is shown by its name, whatever is asked of it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __format__(self, spec: str) -> str:
        return self.name

    def __repr__(self) -> str:
        return self.name


def placeholders(code: str) -> set[str]:
    """The values that the words of a problem take."""
    texts = "".join(WORDS[code].values())
    return {name for _, name, _, _ in string.Formatter().parse(texts) if name} - {"where", "details"}


def approved() -> str:
    """Every problem as its reader sees it, with names in capitals in place of values."""
    placeless = {code for _, call in uses() if len(call.args) == 1 for code in codes(call)}
    shown = []
    for code, words in WORDS.items():
        values = {name: Named(name.upper()) for name in placeholders(code)}
        details = [Problem("other-program", error=text) for text in ("THIS", "THAT") if "{details}" in str(words)]
        lines = render([Problem(code, "" if code in placeless else "WHERE", *details, **values)])
        shown.append("\n    ".join([code, *lines]))
    return "\n\n".join(shown) + "\n"


@cache
def sources() -> dict[str, ast.Module]:
    """The modules of the package, by file."""
    return {str(file.relative_to(PACKAGE)): ast.parse(file.read_text("utf-8")) for file in PACKAGE.rglob("*.py")}


def uses() -> Iterator[tuple[str, ast.Call]]:
    """Each place where a problem is made."""
    for file, module in sources().items():
        for node in ast.walk(module):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Problem":
                yield f"{file}:{node.lineno}", node


def codes(call: ast.Call) -> list[str]:
    """The codes that a problem may have where it is made: one, or two of which one is chosen there."""
    code = call.args[0]
    chosen = (code.body, code.orelse) if isinstance(code, ast.IfExp) else (code,)
    return [each.value for each in chosen if isinstance(each, ast.Constant) and each.value]


def test_the_words_are_those_that_were_approved() -> None:
    assert approved() == APPROVED.read_text(encoding="utf-8"), "python -m tests.test_problems"


def test_every_entry_is_used() -> None:
    texts, patterns = set[str](), list[str]()
    for module in sources().values():
        for node in ast.walk(module):
            if isinstance(node, ast.JoinedStr):
                # a code that is put together, such as f"form-{form}-not-{wanted}"
                pattern = "".join(part.value if isinstance(part, ast.Constant) else "*" for part in node.values)
                patterns += [pattern] if re.fullmatch(r"[a-z]+-[a-z*-]+", pattern) else []
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value)
    unused = [code for code in WORDS if code not in texts and not any(fnmatch(code, each) for each in patterns)]
    assert unused == []


def test_every_use_has_its_entry_and_gives_its_values() -> None:
    for place, call in uses():
        given = {keyword.arg for keyword in call.keywords}
        assert "where" not in given, f"{place}: the place comes second, without its name"
        for code in codes(call):
            assert code in WORDS, f"{place}: {code} is not in {LISTING.name}"
            assert None in given or given == placeholders(code), f"{place}: {given} for {placeholders(code)}"
            assert "{where}" not in WORDS[code]["found"] or len(call.args) > 1, f"{place}: {code} needs its place"


def test_entries_have_a_form() -> None:
    for code, words in WORDS.items():
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", code), code
        assert "found" in words and set(words) <= {"found", "expected", "fix"}, code
        assert "{where}" not in words["found"].removeprefix("{where} "), f"{code}: its place comes first or not at all"
        assert not any(words.get(part, "").endswith(".") for part in ("found", "expected")), code
        assert words.get("fix", ".")[-1] in ".?}", code


@pytest.mark.parametrize("pair", [code.split("-")[1::2] for code in WORDS if code.startswith("form-")])
def test_a_folder_of_another_form_is_refused_in_words(pair: list[str], tmp_path: Path) -> None:
    assert set(pair) <= set(get_args(Form))
    with pytest.raises(CheckpointError) as refused:
        refuse_form(tmp_path, *pair)  # type: ignore[arg-type]
    assert str(refused.value).startswith(f"{tmp_path}: ")


FIX = "Free some space, choose another output folder, or give --base-weights link if the command has it."


def test_a_problem_is_a_sentence() -> None:
    problem = Problem("output-without-space", Path("out"), needed=1024, parent="/disk", free=3)
    assert str(problem) == f"out: needs 1,024 bytes, /disk has 3 free. {FIX}"
    assert str(Problem("interrupted")).startswith("interrupted. An unfinished folder")
    named = Problem("config-nan", "rope.factor")
    assert named.phrase == "rope.factor is NaN, expected a number: no check could say that it was kept"
    assert named.within("config.json").where == "config.json: rope.factor"
    assert named.within("config.json").phrase.startswith("config.json: rope.factor is NaN")


def test_values_are_written_as_the_entry_says() -> None:
    layers = Problem("config-count", "config.json: n_layer", count=7, tensors=1)
    assert layers.found == "is 7, found 1 tensor in all"
    assert "one of: auto, copy" in str(Problem("base-weights-unknown", "x", how="a", choices=("auto", "copy")))
    hostile = Problem("tensor-unreadable", "{where}", tensor="{0.__class__}", error=ValueError("{x}"))
    assert hostile.phrase == "{where}: {0.__class__} cannot be read ({x})", "a name is never a template"


def test_what_helps_against_several_is_said_once() -> None:
    missing = [Problem("shard-missing", name, folder="m") for name in "ab"]
    assert render(missing) == ["a: shard not found in m.", "b: shard not found in m.", "Download it again."]
    mixed = [missing[0], Problem("index-unlisted", "i", tensor="t", shard="s"), missing[1]]
    assert render(mixed) == [
        "a: shard not found in m. Download it again.",
        "i: t lies in s but is not listed.",
        "b: shard not found in m. Download it again.",
    ]


def test_many_of_one_code_are_shortened_in_words_and_whole_as_values() -> None:
    error = CheckpointError(
        *(Problem("file-changed", f"{number}") for number in range(20)), Problem("output-busy", "o")
    )
    assert len(error.problems) == 21
    assert error.lines[11:] == (
        "11: changed while it was read.",
        "... and 8 more.",
        "Run again when nothing writes to it.",
        "o: another process is writing it. Wait until it is done.",
    )


def test_details_are_named_in_the_sentence_or_below_it() -> None:
    inside = [Problem("key-missing", "a"), Problem("value-unfit", "b", value="3", kind="a text")]
    assert str(Problem("record-incomplete", "s.json", *inside)) == (
        "s.json: is incomplete (a is missing; b is 3, expected a text). Restore it from where you got it."
    )
    assert render([Problem("file-changed", "x", *inside)]) == [
        "x: changed while it was read.",
        "a is missing.",
        "b is 3, expected a text.",
        "Run again when nothing writes to it.",
    ]
    assert problems_of(CheckpointError(*inside)) == tuple(inside)
    assert [problem.phrase for problem in problems_of(KeyError("x"))] == ["'x'"]


def test_a_problem_is_a_value() -> None:
    problem = Problem("key-missing", "a")
    assert problem == Problem("key-missing", Path("a")) != Problem("key-missing", "b")
    assert len({problem, Problem("key-missing", "a")}) == 1
    error = pickle.loads(pickle.dumps(CheckpointError(problem)))
    assert type(error) is CheckpointError and error.problems == (problem,)


def test_json_has_problems_as_objects(tmp_path: Path) -> None:
    done = run("inspect", tmp_path / "none", "--json", code=1)
    assert json.loads(done.stdout) == {
        "error": "CheckpointError",
        "problems": [
            {
                "code": "model-not-found",
                "where": f"{tmp_path}/none",
                "found": "not found",
                "expected": "",
                "fix": "Give a model folder or a Hub id such as org/name.",
                "details": [],
            }
        ],
    }
    assert done.stderr == f"error: {tmp_path}/none: not found. Give a model folder or a Hub id such as org/name.\n"
    assert run("inspect", tmp_path / "none", code=1).stdout == ""


if __name__ == "__main__":
    APPROVED.write_text(approved(), encoding="utf-8")
