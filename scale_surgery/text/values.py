"""JSON values in the words of errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scale_surgery.checkpoint.reading import HALF_A_CHARACTER

HALF = "holds half a character (a lone surrogate), expected Unicode text"
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


def text_problem(value: Any, name: str) -> str | None:
    """Say what is wrong with a field that has to be a text; None if nothing is."""
    if not isinstance(value, str):
        return f'"{name}" is {kind_of(value)}, expected a text'
    # JSON can escape lone surrogates, which are no Unicode
    return f'"{name}" {HALF}' if HALF_A_CHARACTER.search(value) else None


def named(row: Mapping[str, Any]) -> str:
    """Name the fields of a row."""
    return ", ".join(map(str, row)) or "none"
