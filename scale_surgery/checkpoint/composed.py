"""Composed folders where something else is needed: what to say of one, and the line to type."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Literal

from scale_surgery.checkpoint.expansions import EXPANSIONS_KEY
from scale_surgery.checkpoint.names import COMPOSED_FILE, CONFIG_FILE
from scale_surgery.checkpoint.numbering import CONFIG_KEY
from scale_surgery.checkpoint.reading import parse_json, read_bytes
from scale_surgery.errors import CheckpointError

Wanted = Literal["an expanded model", "a base model", "an extract"]


def refuse_composed(path: Path, wanted: Wanted) -> None:
    """Refuse a composed folder where one of the models in it is needed.

    Args:
        path: A folder.
        wanted: What is needed.

    Raises:
        CheckpointError: If it is a composed folder, with its record or without; its expansions are named.
    """
    refuse_lost_record(path)
    if not (path / COMPOSED_FILE).is_file():
        return
    names = _names(path, COMPOSED_FILE)
    raise CheckpointError(
        f"{path}: is a composed folder of {', '.join(names) or 'expansions'}, expected {wanted}. "
        f"{_advice(path, names, wanted)}"
    )


def refuse_lost_record(path: Path) -> None:
    """Refuse a folder that is a composed one by its config.json, and has no record.

    Args:
        path: A folder.

    Raises:
        CheckpointError: If it is one; its expansions are named.
    """
    names = _names(path, CONFIG_FILE, CONFIG_KEY)
    # one alone may be what a trainer saved
    if (path / COMPOSED_FILE).is_file() or len(names) < 2:
        return
    line = _line("compose", "BASE", "EXTRACT")
    raise CheckpointError(
        f"{path}: has no {COMPOSED_FILE}, the record of a composed folder of {', '.join(names)}, expected it. "
        f"Restore it from where you got the folder, or compose base and extracts again: {line} ... -o COMPOSED"
    )


def _names(path: Path, file: str, *keys: str) -> list[str]:
    """Names of the expansions, as a file says under some keys; none where that cannot be read."""
    try:
        content = parse_json(read_bytes(path / file).decode("utf-8"))
        for key in keys:
            content = content[key]
        found = content[EXPANSIONS_KEY]
        return [str(own["name"]) for own in found] if isinstance(found, list) else list(map(str, found))
    except (OSError, ValueError, LookupError, TypeError):
        return []


def _advice(path: Path, names: list[str], wanted: Wanted) -> str:
    if wanted == "a base model":
        return f"Take its base out: {_line('strip', path, '-o', 'BASE')}"
    name = names[0] if names else "NAME"
    taking = f"Take one out: {_line('extract', path, '--name', name, '-o', 'EXTRACT')}"
    if wanted == "an extract":
        return taking
    return f"{taking}, and put it on its base: {_line('apply', 'EXTRACT', '--base', 'MODEL', '-o', 'EXPANDED')}"


def _line(*words: object) -> str:
    return shlex.join(["scale-surgery", *map(str, words)])
