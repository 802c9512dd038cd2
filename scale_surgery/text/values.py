"""Names of JSON values, and fields that have to be texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scale_surgery.checkpoint.reading import HALF_A_CHARACTER
from scale_surgery.errors import Problem

KINDS: tuple[tuple[Any, str], ...] = (
    (bool, "true or false"),
    ((int, float), "a number"),
    (str, "a text"),
    (list, "a list"),
    (Mapping, "an object"),
)


def kind_of(value: Any) -> str:
    """Name the kind of a JSON value."""
    if value is None:
        return "empty"
    return next((name for kind, name in KINDS if isinstance(value, kind)), type(value).__name__)


def text_problem(value: Any, name: str) -> Problem | None:
    """Return the problem of a field that has to be a text, or None."""
    if not isinstance(value, str):
        return Problem("value-unfit", f'"{name}"', value=kind_of(value), kind="a text")
    return half_problem(value, name)


def half_problem(text: str, name: str) -> Problem | None:
    """Return the problem of a field whose text, or whose JSON, contains half a character, or None."""
    # JSON can escape lone surrogates, which are not valid Unicode
    return Problem("half-a-character", f'"{name}"') if HALF_A_CHARACTER.search(text) else None


def fields_problem(row: Mapping[str, Any], expected: str, where: str) -> Problem:
    """Return the problem of an object with other fields than expected."""
    return Problem("fields-unfit", where, fields=list(row) or "none", kind=expected)
