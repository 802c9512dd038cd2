"""What a JSON file of this program may hold: the type hints of the dataclass that it becomes.

    tuple[T, ...]   a list          Mapping[str, T]   an object of any keys
    a dataclass     an object       T | None          null too, and so for texts, numbers, Literal and Annotated ranges

`misfits` finds everything that is of another kind, `build` makes the dataclass. No library does it: the records are
dataclasses already, whose ranges and choices the command line reads too, and pydantic would want them as models of its
own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from scale_surgery.errors import shorten
from scale_surgery.fields import Range

WORDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
# of a value that is quoted
MOST_CHARACTERS = 60


def misfits(value: Any, hint: Any, place: str = "") -> Iterator[str]:
    """Find where plain JSON values are not what a type hint asks for.

    Args:
        value: The values.
        hint: The hint.
        place: What the values are called.

    Yields:
        A line for each place, such as `plan.layers[2] is 'x', expected a whole number`.
    """
    if not _check_of(hint)(value):
        yield from _all_misfits(value, hint, place)


@functools.cache
def _check_of(hint: Any) -> Callable[[Any], bool]:
    """What says whether a value has no misfit: records hold thousands of values, hardly any of another kind."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        is_null_allowed = NoneType in inner
        check = _check_of(next(own for own in inner if own is not NoneType))
        return lambda value: (value is None and is_null_allowed) or check(value)
    if kind is Annotated:
        check, allowed = _check_of(inner[0]), inner[1]
        return lambda value: check(value) and value in allowed
    if dataclasses.is_dataclass(hint):
        return _check_of_fields(hint)
    if kind is tuple and inner[-1] is ...:
        check = _check_of(inner[0])
        return lambda value: isinstance(value, list) and all(map(check, value))
    if kind is tuple:
        checks = [_check_of(own) for own in inner]
        return lambda value: (
            isinstance(value, list)
            and len(value) == len(checks)
            and all(check(own) for check, own in zip(checks, value, strict=True))
        )
    if inner and _is_mapping(hint):
        check = _check_of(inner[1])
        return lambda value: isinstance(value, dict) and all(map(check, value.values()))
    return lambda value: _expected(value, hint) is None


def _check_of_fields(owner: Any) -> Callable[[Any], bool]:
    checks = {name: _check_of(hint) for name, hint in _hints(owner).items()}
    fields = dataclasses.fields(owner)
    needed = {own.name for own in fields if own.default is own.default_factory is dataclasses.MISSING}
    known = {own.name: checks[own.name] for own in fields}
    return lambda value: (
        isinstance(value, dict)
        and needed <= value.keys() <= known.keys()
        and all(known[name](own) for name, own in value.items())
    )


def _all_misfits(value: Any, hint: Any, place: str) -> Iterator[str]:
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        if value is not None or NoneType not in inner:
            yield from misfits(value, next(own for own in inner if own is not NoneType), place)
    elif kind is Annotated:
        yield from list(misfits(value, inner[0], place)) or _out_of_range(value, inner[1], place)
    elif (expected := _expected(value, hint)) is not None:
        yield f"{place or 'it'} is {_quoted(value)}, expected {expected}"
    elif dataclasses.is_dataclass(hint):
        yield from _misfits_of_fields(value, hint, place)
    elif kind is tuple:
        hints = [inner[0]] * len(value) if inner[-1] is ... else inner
        for number, (own, own_hint) in enumerate(zip(value, hints, strict=True)):
            yield from misfits(own, own_hint, f"{place}[{number}]")
    elif inner and _is_mapping(hint):
        for name, own in value.items():
            yield from misfits(own, inner[1], _inside(place, name))


def known_misfits(value: Any, owner: type, place: str = "") -> Iterator[str]:
    """As `misfits` for a dataclass, of its own keys alone; the file may hold others."""
    known = {field.name for field in dataclasses.fields(owner)}
    kept = {name: own for name, own in value.items() if name in known} if isinstance(value, dict) else value
    return misfits(kept, owner, place)


def in_one_line(problems: list[str]) -> str:
    """Problems of one file as a sentence, those beyond a dozen counted."""
    return "; ".join(shorten(problems, ending=""))


def build(value: Any, hint: Any) -> Any:
    """Make of plain JSON values what a type hint asks for; values that misfit are not noticed."""
    return None if value is None else _maker_of(hint)(value)


@functools.cache
def _maker_of(hint: Any) -> Callable[[Any], Any]:
    """What makes of a value that is not null what a hint asks for."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return _maker_of(next(own for own in inner if own is not NoneType))
    if kind is Annotated:
        return _maker_of(inner[0])
    if dataclasses.is_dataclass(hint):
        hints, make = _hints(cast("Hashable", hint)), cast("Callable[..., Any]", hint)
        return lambda value: make(**{name: build(own, hints[name]) for name, own in value.items()})
    if kind is tuple:
        return lambda value: tuple(build(own, inner[0]) for own in value)
    if inner and _is_mapping(hint):
        return lambda value: {name: build(own, inner[1]) for name, own in value.items()}
    return lambda value: value


@functools.cache
def _hints(owner: Hashable) -> dict[str, Any]:
    return get_type_hints(cast("type", owner), include_extras=True)


def _is_mapping(hint: Any) -> bool:
    return get_origin(hint) in (Mapping, dict)


def _expected(value: Any, hint: Any) -> str | None:
    """What a value should have been, looked at from outside; None where it is of that kind."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind is Literal:
        return None if isinstance(value, str) and value in inner else f"one of {', '.join(inner)}"
    if dataclasses.is_dataclass(hint) or _is_mapping(hint):
        return None if isinstance(value, dict) else "an object"
    if kind is tuple and inner[-1] is not ...:
        return None if isinstance(value, list) and len(value) == len(inner) else f"a list of {len(inner)}"
    if kind is tuple:
        return None if isinstance(value, list) else "a list"
    if hint is Any or hint is bool:
        return None if hint is Any or isinstance(value, bool) else WORDS[bool]
    kinds = (int, float) if hint is float else hint
    return None if isinstance(value, kinds) and not isinstance(value, bool) else WORDS[hint]


def _misfits_of_fields(value: Mapping[str, Any], owner: Any, place: str) -> Iterator[str]:
    hints, known = _hints(owner), {field.name: field for field in dataclasses.fields(owner)}
    yield from (f"{_inside(place, name)} is unknown" for name in value if name not in known)
    for name, field in known.items():
        if name in value:
            yield from misfits(value[name], hints[name], _inside(place, name))
        elif field.default is field.default_factory is dataclasses.MISSING:
            yield f"{_inside(place, name)} is missing"


def _out_of_range(value: Any, allowed: Range, place: str) -> Iterator[str]:
    if value not in allowed:
        yield f"{place} is {_quoted(value)}, expected {allowed}"


def _inside(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _quoted(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."
