"""Command lines of this program: quoted for a shell, with the options that differ from their defaults."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Iterator
from typing import Any

from scale_surgery.fields import Field, fields_of


def command(*words: object) -> str:
    """Return a command line of this program."""
    return shlex.join(["scale-surgery", *map(str, words)])


def changed_options(options: Any, defaults: Any, without: Collection[str] = ()) -> Iterator[str]:
    """Yield the words of the options in which a filled dataclass differs from its defaults."""
    for name, field in fields_of(type(options)).items():
        value = getattr(options, name)
        if name not in without and field.is_plain and value not in (None, getattr(defaults, name)):
            yield from _typed(field, value)


def _typed(field: Field, value: Any) -> list[str]:
    if not field.has_option:
        return ["--set", f"{field.name}={as_yaml(value)}"]
    option = f"--{field.option}"
    if isinstance(value, bool):
        return [option if value else f"--no-{field.option}"]
    if isinstance(value, tuple) and not field.choices:
        return [word for entry in value for word in (option, entry)]
    return [option, ",".join(value) if isinstance(value, tuple) else str(value)]


def as_yaml(value: Any) -> str:
    """Return a value in the form that --set accepts."""
    import yaml

    # YAML ends the document after a bare value
    return str(yaml.safe_dump(value, width=math.inf)).removesuffix("\n").removesuffix("\n...")


def of_revision(revision: str | None) -> list[str]:
    """Return the option for a revision of a Hub repository."""
    return ["--revision", revision] if revision else []
