"""Records of runs: a line of JSON for each, in a file that grows as they end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file; a missing file has none."""
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            # a run that was killed while it wrote has left a part of a line, which is no JSON
            with suppress(json.JSONDecodeError):
                yield json.loads(line)


def append_line(file: Path, record: Mapping[str, Any]) -> None:
    """Write one record as one line at the end of a file."""
    is_cut = file.exists() and not file.read_bytes().endswith(b"\n")
    with file.open("a", encoding="utf-8") as stream:
        stream.write("\n" * is_cut + json.dumps(record) + "\n")
