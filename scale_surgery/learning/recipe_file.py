"""Recipes as YAML files: read with line numbers in errors, written with comments and defaults."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import yaml

from scale_surgery.checkpoint.files import write_text
from scale_surgery.checkpoint.plain_yaml import PlainLoader
from scale_surgery.checkpoint.reading import read_bytes
from scale_surgery.errors import PlanError, Problem
from scale_surgery.fields import Field, fields_of
from scale_surgery.learning.recipe import (
    PRESET,
    SECTIONS,
    Recipe,
    RecipeValues,
    preset_problems,
    settings,
    unknown_setting,
    value_problems,
    values_of,
)

MOST_BYTES = 1_000_000
WIDTH = 100


def read_recipe(file: str | Path) -> dict[str, Any]:
    """Read the settings of a recipe.

    Args:
        file: A YAML file: settings at the top, others in sections, such as `training:` with `steps: 200` below it.

    Returns:
        Its values by the name of the setting, such as "training.steps"; and "preset", where it names one.

    Raises:
        PlanError: If it is no YAML, or holds unknown settings or invalid values; every problem is named with its line.
    """
    path = Path(file)
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, node in _entries(path, _parse(path)):
        if name in values:
            found = [Problem("setting-twice", name)]
        else:
            values[name], found = _read(name, node)
        problems += [problem.within(f"{path}, line {node.start_mark.line + 1}") for problem in found]
    if problems:
        raise PlanError(*problems)
    return values


def _read(name: str, node: yaml.Node) -> tuple[Any, list[Problem]]:
    """Read the value of a setting, and the problem that it has."""
    try:
        value = yaml.SafeLoader("").construct_document(node)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return None, [Problem("setting-no-value", name, error=_first_line(error))]
    if name == PRESET:
        return value, preset_problems(value)
    if name in SECTIONS:
        return value, [Problem("section-without-settings", name)]
    if name not in settings():
        return value, [unknown_setting(name)]
    value = settings()[name].read(value)
    return value, value_problems(name, value)


def _parse(path: Path) -> yaml.Node | None:
    try:
        text = read_bytes(path, most=MOST_BYTES).decode()
        return yaml.compose(text, Loader=PlainLoader)
    except OSError as error:
        raise PlanError(Problem("recipe-unreadable", path, error=error.strerror or error)) from error
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise PlanError(Problem("recipe-no-yaml", path, error=_first_line(error))) from error


def _first_line(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
    return f"line {mark.line + 1}: {problem}" if mark is not None else problem


def _entries(path: Path, node: yaml.Node | None) -> Iterator[tuple[str, yaml.Node]]:
    """Settings with their nodes; names of a section begin with its name."""
    if node is None:
        return
    if not isinstance(node, yaml.MappingNode):
        raise PlanError(Problem("recipe-without-settings", path))
    for key, value in node.value:
        name = _plain(key)
        if name in SECTIONS and isinstance(value, yaml.MappingNode):
            yield from ((f"{name}.{_plain(inner)}", entry) for inner, entry in value.value)
        elif not (name in SECTIONS and _is_empty(value)):
            yield name, value


def _is_empty(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _plain(key: yaml.Node) -> str:
    """A name, in which dashes are underscores."""
    return str(key.value).replace("-", "_") if isinstance(key, yaml.ScalarNode) else "a list"


def write_recipe(recipe: Recipe, file: str | Path) -> None:
    """Write a recipe with all its settings, whole or not at all; an existing file is replaced.

    Args:
        recipe: The recipe.
        file: YAML file to be.

    Raises:
        OSError: If it cannot be written.
    """
    write_text(Path(file), recipe_text(recipe))


def recipe_text(recipe: Recipe) -> str:
    """A recipe as commented YAML."""
    return "\n".join(_lines(values_of(recipe))) + "\n"


def _lines(values: RecipeValues) -> Iterator[str]:
    yield "# Run it: scale-surgery learn --recipe THIS_FILE -o OUT"
    yield "# Every setting is here; what is left out is as it usually is."
    usual = settings()
    for name in (name for name in values if "." not in name):
        yield from ("", *_setting(usual[name], values[name]))
    about = fields_of(Recipe)
    for section in SECTIONS:
        yield from ("", *_comment(about[section].help), f"{section}:")
        for name in (name for name in values if name.startswith(f"{section}.")):
            yield from textwrap.indent("\n".join(_setting(usual[name], values[name])), "  ").split("\n")


def _setting(setting: Field, value: Any) -> Iterator[str]:
    yield from _comment(setting.help + _extra(setting))
    plain = list(value) if isinstance(value, tuple) else value
    # only printable text is written unescaped: YAML takes some control characters for line ends
    is_plain = "".join(map(str, plain if isinstance(plain, list) else [plain])).isprintable()
    text = yaml.safe_dump(plain, default_flow_style=True, allow_unicode=is_plain, width=10**6)
    # after a bare value YAML ends the document
    yield f"{setting.name}: {text.removesuffix(chr(10)).removesuffix(chr(10) + '...')}"


def _extra(setting: Field) -> str:
    parts = [
        f"one of {', '.join(setting.choices)}" if setting.choices and setting.kind is not tuple else "",
        "" if setting.range is None else setting.range.bounds,
        "" if setting.default in (None, MISSING, ()) else f"default: {_shown(setting.default)}",
    ]
    extra = "; ".join(filter(None, parts))
    return f" [{extra}]" if extra else ""


def _shown(value: Any) -> str:
    return (
        ", ".join(value) if isinstance(value, tuple) else str(value).lower() if isinstance(value, bool) else f"{value}"
    )


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ")
