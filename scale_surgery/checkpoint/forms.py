"""Forms of folders, and the command to type if a folder has the wrong form.

form        known by                             contents
base        config.json without our key          an unmodified model
expanded    surgery.json                         base shards, and shards of one or more expansions
fused       surgery.json with this form          the blocks of an expansion, joined with the base's tensors
stock       merge.json                           a plain checkpoint of the base's architecture
extract     extract.json                         an expansion without its base
saved       our key, and no record               an expanded model saved by a trainer
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

from scale_surgery.checkpoint.foreign import adopt_line
from scale_surgery.checkpoint.names import CONFIG_FILE, EXTRACT_FILE, MANIFEST_FILE, STOCK_FILE
from scale_surgery.checkpoint.numbering import CONFIG_KEY
from scale_surgery.checkpoint.reading import parse_json, read_bytes
from scale_surgery.errors import CheckpointError, Problem

Form = Literal["base", "expanded", "fused", "stock", "extract", "saved"]
RECORDS: Mapping[str, Form] = {EXTRACT_FILE: "extract", MANIFEST_FILE: "expanded", STOCK_FILE: "stock"}


def form_of(path: Path) -> Form:
    """Return the form of a folder from its records and config.json.

    Exception: `fused` is not distinguished from `expanded` here. It is recorded in surgery.json.
    """
    recorded = next((form for file, form in RECORDS.items() if (path / file).is_file()), None)
    return recorded or ("saved" if CONFIG_KEY in _config(path) else "base")


def refuse_form(path: str | Path, form: Form, wanted: Form) -> NoReturn:
    """Reject a folder of the wrong form, with the command that helps."""
    values = {"adopt": adopt_line(path)} if form == "saved" else {}
    raise CheckpointError(Problem(f"form-{form}-not-{wanted}", path, **values))


def refuse_extract(path: str | Path, files: Iterable[str]) -> None:
    """Reject an extract if a whole model is needed."""
    if EXTRACT_FILE in files:
        refuse_form(path, "extract", "expanded")


def _config(path: Path) -> dict[str, Any]:
    """Return the parsed config.json; empty if it cannot be read."""
    try:
        config = parse_json(read_bytes(path / CONFIG_FILE).decode("utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
