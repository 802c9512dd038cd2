"""Docstrings say who does what: their first word is a verb or a noun, and no relative pronoun."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import scale_surgery

PACKAGE = Path(scale_surgery.__file__).parent
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# "What is left out" has to be read twice: "Return the files that are left out" has not
PRONOUNS = {"What", "Whether", "Where", "That", "One", "Those", "All"}


def first_words(text: str) -> Iterator[tuple[int, str]]:
    """The first word of each docstring, with the line where its owner begins."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), docstring.split()[0].rstrip(":,.")


def test_no_docstring_begins_with_a_pronoun() -> None:
    assert [
        f"{file.relative_to(PACKAGE)}:{line}: {word}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for line, word in first_words(file.read_text(encoding="utf-8"))
        if word in PRONOUNS
    ] == []


def test_the_control_is_found() -> None:
    assert list(first_words('def f():\n    """What is left out."""\n')) == [(1, "What")]
