"""Records of runs: a line of JSON for each, in a file that grows as they end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Read the records that a file holds; none where there is no file."""
    if file.exists():
        lines = file.read_text(encoding="utf-8").splitlines()
        # the last value of a record is an object; a run that was killed while it wrote has left a part of a line
        yield from (json.loads(line) for line in lines if line.endswith("}}"))


def append_line(file: Path, record: Mapping[str, Any]) -> None:
    """Write one record as one line at the end of a file."""
    is_cut = file.exists() and not file.read_bytes().endswith(b"\n")
    with file.open("a", encoding="utf-8") as stream:
        stream.write("\n" * is_cut + json.dumps(record) + "\n")
