"""An option is written once: in the dataclass that it fills. Everything else about it is read from there.

    type, choices, range    the type hint: `int`, `Literal["a", "b"]`, `Annotated[int, Range(least=1)]`
    default                 the field
    help                    the field's line in the docstring, under `Attributes:`

A field's metadata says what these cannot: another name on the command line (`option`), choices that are rows of a table
(`choices`, a function that lists them), and that there is no option, because hardly anybody types it (`NO_OPTION`).
Such a field is filled by `--set KEY=VALUE`, by a recipe, or in Python.

The command line makes its options from this, and `problems_of` checks values that came from Python or from a file. The
help stands in the docstring, and not in the metadata of a field, because there the pages of the API find it too.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from scale_surgery.errors import Problem

KIND_NAMES: dict[type, str] = {bool: "True or False", str: "text", int: "a whole number", float: "a number"}
# 0200 is 128 to some and 200 to others
WHOLE = re.compile("[-+]?(0|[1-9][0-9]*)")
ENTRY = re.compile(r"^(\w+): (.+?)(?=^\w+: |\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Range:
    """The numbers that an option may take: finite ones within all of these bounds.

    Attributes:
        least: The smallest.
        above: Numbers are larger than this.
        most: The largest.
        below: Numbers are smaller than this.
        noun: What such a number is called.
    """

    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    below: float = math.inf
    noun: str = ""

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most and self.above < value < self.below

    def __str__(self) -> str:
        return f"{self.noun}, {self.bounds}" if self.noun else self.bounds

    def __get_pydantic_core_schema__(self, kind: Any, handler: Any) -> Any:
        """How pydantic checks a number of a record."""
        from pydantic_core.core_schema import no_info_after_validator_function

        return no_info_after_validator_function(self._check, handler(kind))

    def _check(self, value: float) -> float:
        if value not in self:
            raise ValueError(self)
        return value

    @property
    def bounds(self) -> str:
        """Its ends in words."""
        if math.isfinite(self.least) and math.isfinite(self.most):
            return f"from {self.least} to {self.most}"
        bounds = {"at least": self.least, "more than": self.above, "at most": self.most, "less than": self.below}
        return " and ".join(f"{words} {bound}" for words, bound in bounds.items() if math.isfinite(bound))


Count = Annotated[int, Range(least=1)]
# the first token of a sequence is not predicted
SequenceLength = Annotated[int, Range(least=2)]
# metadata of a field that has no option of its own
NO_OPTION: dict[str, Any] = {"has_option": False}
# what every random generator takes
Seed = Annotated[int, Range(least=0, most=2**32 - 1)]


@dataclass(frozen=True)
class Field:
    """What is known of one field of a dataclass, and so of the option that fills it.

    Attributes:
        name: Its name.
        option: Its name on the command line: the same with dashes, or that in the field's metadata.
        has_option: Whether it has an option of its own; --set fills the others.
        kind: Type of its values; for choices that of a choice.
        part: Type of the values in a tuple.
        list_choices: Lists the values that it may take, or that those in a tuple may take; none where any may be.
        range: The numbers that it may take, or None.
        default: Its default; `dataclasses.MISSING` where it has none.
        is_optional: Whether it may be None.
        help: What the docstring says of it.
    """

    name: str
    option: str
    has_option: bool
    kind: type
    part: type
    list_choices: Callable[[], Iterable[str]]
    range: Range | None
    default: Any
    is_optional: bool
    help: str

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that it may take, at this moment; empty where any may be."""
        return tuple(self.list_choices())

    @property
    def is_plain(self) -> bool:
        """Whether it can be typed; a dataclass cannot."""
        return not dataclasses.is_dataclass(self.kind)

    @property
    def typed(self) -> str:
        """How messages call it: as an option, or as --set and a recipe do."""
        return f"--{self.option}" if self.has_option else self.name

    def read(self, value: Any) -> Any:
        """Make what was typed, or came from Python, its value; what it cannot be is said by `expects`."""
        # in Python layers may be the number 4
        if self.kind is str and isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        if self.kind in (int, float):
            return _number(value, self.kind)
        # one text needs no list, and names may be one line with commas
        if self.kind is tuple:
            # the name of a text may hold commas
            parts = (value.split(",") if self.choices else [value]) if isinstance(value, str) else value
            if isinstance(parts, list | tuple):
                return tuple(part.strip() if isinstance(part, str) else part for part in parts)
        return value

    def expects(self, value: object, *, with_range: bool = True) -> str | None:
        """Say what a value should have been; None where it is fine, and for fields of other types."""
        if value is None and self.is_optional:
            return None
        if not self.is_plain:
            return None if isinstance(value, self.kind) else self.kind.__name__
        if self.kind is tuple:
            parts = list(value) if isinstance(value, tuple | list) else [None]
            if self.part is float:
                return None if all(map(_is_number, parts)) else "numbers"
            # which texts they may be is said where they are used
            return None if all(isinstance(part, str) for part in parts) else f"some of: {', '.join(self.choices)}"
        if self.kind not in KIND_NAMES:
            return None
        if self.choices:
            return None if value in self.choices else f"one of: {', '.join(self.choices)}"
        kinds = (int, float) if self.kind is float else self.kind
        # True is a whole number to Python
        if not isinstance(value, kinds) or (isinstance(value, bool) and self.kind is not bool):
            return KIND_NAMES[self.kind]
        is_allowed = not with_range or self.range is None or value in self.range  # type: ignore[operator]
        return None if is_allowed else str(self.range)


def fields_of(owner: type) -> dict[str, Field]:
    """Read what a dataclass with a docstring in Google style says of its fields: by name, in order."""
    hints, lines = get_type_hints(owner, include_extras=True), _attribute_lines(owner)
    return {
        field.name: _read_field(field, hints[field.name], lines.get(field.name, ""))
        for field in dataclasses.fields(owner)
    }


def problems_of(filled: Any, *, with_ranges: bool = True) -> list[Problem]:
    """List the fields of a filled dataclass whose values do not fit; without ranges, only types and choices count."""
    pairs = ((field, getattr(filled, field.name)) for field in fields_of(type(filled)).values())
    return [
        Problem("value-unfit", field.typed, value=repr(value), kind=expected)
        for field, value in pairs
        if (expected := field.expects(value, with_range=with_ranges)) is not None
    ]


def _read_field(field: dataclasses.Field[Any], hint: Any, line: str) -> Field:
    is_optional = NoneType in get_args(hint)
    (annotation,) = set(get_args(hint)) - {NoneType} if is_optional else (hint,)
    annotation, allowed = get_args(annotation) if get_origin(annotation) is Annotated else (annotation, None)
    kind = get_origin(annotation) or annotation
    listed = annotation if kind is Literal else get_args(annotation)[0] if kind is tuple else None
    return Field(
        name=field.name,
        option=field.metadata.get("option", field.name.replace("_", "-")),
        has_option=field.metadata.get("has_option", True),
        kind=str if kind is Literal else kind,
        part=float if listed is float else str,
        list_choices=field.metadata.get("choices", lambda: get_args(listed)),
        range=allowed,
        default=field.default,
        is_optional=is_optional,
        help=line,
    )


def _number(value: Any, kind: type) -> Any:
    """The number that a text says, whole where it looks so; what says none of this kind stays as it is."""
    if not isinstance(value, str):
        return value
    try:
        return int(value) if WHOLE.fullmatch(value) else value if kind is int else float(value)
    except ValueError:  # also of a whole number with thousands of digits
        return value


def _is_number(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and -math.inf < value < math.inf  # type: ignore[operator]


def _attribute_lines(owner: type) -> dict[str, str]:
    """What a docstring says under `Attributes:`; nothing where Python runs without docstrings."""
    section = inspect.cleandoc(owner.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    return {name: " ".join(text.split()) for name, text in ENTRY.findall(textwrap.dedent(section))}
