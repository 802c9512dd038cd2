"""Records: JSON files of this program. pydantic checks them against dataclasses.

A dataclass is closed: an unknown key is a problem, unless the class is marked with `open_record`. Parts that remain
plain values are TypedDicts.
"""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from scale_surgery.checkpoint.folder import read_json
from scale_surgery.errors import CheckpointError, PlanError, Problem, in_one_line, problems_of

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

T = TypeVar("T")
# our words for expected values, instead of pydantic's "a valid string"
WORDS = {
    "string_type": "a text",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "too_long": "fewer values",
}
# errors that damaged values may cause
DAMAGE = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError)


class RecordError(CheckpointError, ValueError):
    """Values that do not fit a record.

    Callers that know the file catch it as a ValueError and name the file.
    """

    def __str__(self) -> str:
        return in_one_line([problem.phrase for problem in self.problems])


def open_record(kind: T) -> T:
    """Allow unknown keys in records of a dataclass or a TypedDict. A TypedDict keeps them."""
    kind.__pydantic_config__ = {"strict": True, "extra": "ignore"}  # type: ignore[attr-defined]
    if not is_dataclass(kind):
        kind.__get_pydantic_core_schema__ = _checked_schema  # type: ignore[attr-defined]
    return kind


def _checked_schema(kind: Any, handler: Any) -> Any:
    from pydantic_core.core_schema import no_info_wrap_validator_function

    def keep(value: Any, check: Any) -> Any:
        check(value)
        return value

    return no_info_wrap_validator_function(keep, handler(kind))


def read_record(content: Any, kind: type[T], place: str = "") -> T:
    """Convert plain JSON values to a dataclass or TypedDict. RecordError names each value that does not fit."""
    from pydantic import ValidationError
    from pydantic_core import to_json

    # as JSON: strict validation of Python values rejects a list for a tuple
    text = to_json([content], inf_nan_mode="constants", fallback=repr)
    try:
        (record,) = _adapter(cast("Any", kind)).validate_json(text)
        return cast("T", record)
    except ValidationError as error:
        raise RecordError(*(_problem(line, place) for line in error.errors())) from None


def read_record_file(file: Path, kind: type[T], format_number: int) -> T:
    """Read a record of one format."""
    content = read_json(file)
    if content.get("format") != format_number:
        raise CheckpointError(Problem("record-format", file, found=content.get("format"), format=format_number))
    with reading(file):
        return read_record(content, kind)


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Convert errors of damaged values to a CheckpointError that names the file."""
    try:
        yield
    except (*DAMAGE, PlanError) as error:
        raise CheckpointError(Problem("record-incomplete", file, *problems_of(error))) from error


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import ConfigDict, TypeAdapter

    # inner dataclasses inherit these settings
    return TypeAdapter(tuple[kind], config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))


def _problem(error: ErrorDetails, place: str) -> Problem:
    for key in error["loc"][1:]:
        place += f"[{key}]" if isinstance(key, int) else f".{key}" if place else key
    if error["type"] == "missing":
        return Problem("key-missing", place)
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return Problem("key-unknown", place)
    expected = WORDS.get(error["type"]) or error["msg"].removeprefix("Input should be ")
    if error["type"] == "value_error":
        expected = str(error["ctx"]["error"])
    return Problem("value-unfit", place or "it", value=reprlib.repr(error["input"]), kind=expected)
