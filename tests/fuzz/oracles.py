"""What has to hold after any operation on any input, judged without the program's own readers where that can be."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scale_surgery import SurgeryError, strip, verify
from tests.conftest import digests

# may differ from what was written in a folder that still is what it says: training, a card, results
FREE = ("surgery.json", "README.md", "model.safetensors.index.json")
Snapshot = dict[str, tuple[Any, ...]]


def snapshot(place: Path) -> Snapshot:
    """Everything below a folder, without following a link or opening what is no file."""
    states = {}
    for folder, folders, files in os.walk(place):
        for name in (*folders, *files):
            path = Path(folder, name)
            states[str(path.relative_to(place))] = _state(path)
    return states


def _state(path: Path) -> tuple[Any, ...]:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return ("link", str(path.readlink()))
    if not stat.S_ISREG(status.st_mode):
        return ("other", stat.S_IFMT(status.st_mode))
    return (status.st_size, status.st_mtime_ns, _sha256(path) if status.st_size < 1 << 24 else "")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def differing(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Names that came, went or changed."""
    return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))


def changed_content(model: Path, seed: Path) -> list[str]:
    """Files of a folder that are not what they were and that its record vouches for: base, code and configuration."""
    names = {path.relative_to(folder).as_posix() for folder in (model, seed) for path in folder.rglob("*")}
    return [name for name in sorted(names) if _is_vouched(name, seed) and not _is_same(model / name, seed / name)]


def _is_vouched(name: str, seed: Path) -> bool:
    # joined tensors hold both; what of them is the base's, `strip` shows
    if name.startswith(("expansion-", "fused-")) or name in FREE:
        return False
    # of what was added, code alone
    return (seed / name).is_file() or (name.endswith(".py") and "/" not in name)


def _is_same(first: Path, second: Path) -> bool:
    try:
        if not first.is_file():  # a device has no end
            return False
        if first.read_bytes() == second.read_bytes():
            return True
        return first.suffix == ".json" and first.name != "generation_config.json" and _says(first) == _says(second)
    except (OSError, ValueError, RecursionError):
        return False


def _says(file: Path) -> str:
    """What a document says, in one form: JSON has one kind of number, so that 1.0 is 1; true is none."""
    return json.dumps(json.loads(file.read_bytes().decode(), parse_float=_number), sort_keys=True)


def _number(digits: str) -> float:
    number = float(digits)
    return int(number) if number.is_integer() else number


def is_verified(model: Path) -> bool:
    """Whether `verify` finds no fault in the files."""
    try:
        return verify(model, probes=None, record=False).passed
    except SurgeryError:
        return False


def base_problems(stripped: Path, base: Path) -> list[str]:
    """Files of a base that was given back that are not those of the base."""
    return [name for name in differing(digests(stripped), digests(base)) if not name.startswith(".cache")]


def strip_problems(expanded: Path, base: Path, place: Path) -> list[str]:
    """Whether the base comes back out of what was made of it: every file that was taken along."""
    strip(expanded, place)
    recorded = json.loads((expanded / "surgery.json").read_text(encoding="utf-8"))["base_files"]
    has = digests(place)
    return [name for name in recorded if has.get(name) != _sha256(base / name)]


def unprintable(text: str) -> Iterator[str]:
    """Characters that would steer a terminal, or are none."""
    for character in text:
        if unicodedata.category(character) in ("Cc", "Cs") and character != "\n":
            yield f"U+{ord(character):04X}"
