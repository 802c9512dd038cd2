"""Files of text: plain text, JSON lines and JSON arrays."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.reading import open_regular
from scale_surgery.errors import DataError
from scale_surgery.progress import Progress

# value of a blank line of JSONL
BLANK = {"text": ""}


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raise DataError for errors of the system, and for bytes that are no UTF-8."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file. Give UTF-8 text, JSONL or a saved dataset.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: cannot be read as text ({error}). Give UTF-8 text, JSONL or a saved dataset."
        ) from error


@contextmanager
def open_text(
    path: Path, advance: Progress, newline: str | None = None
) -> Iterator[tuple[TextIOWrapper, Callable[[], None]]]:
    """Open UTF-8 text, and give a function that reports the bytes that were read since it was last called."""
    done = 0

    def report() -> None:
        nonlocal done
        now = stream.tell()
        advance(now - done)
        done = now

    # without a byte order mark
    with readable(path), open_regular(path) as stream, TextIOWrapper(stream, "utf-8-sig", newline=newline) as text:
        yield text, report


def read_lines(path: Path, advance: Progress) -> Iterator[Any]:
    """The values of a file of JSON lines: BLANK for an empty line, a ValueError for one that is no JSON."""
    # other line ends may stand inside JSON texts
    with open_text(path, advance, newline="\n") as (text, report):
        for line in text:
            try:
                yield json.loads(line.removesuffix("\n")) if line.strip() else BLANK
            except (ValueError, RecursionError) as error:
                yield ValueError(str(error))
            report()


def read_array(path: Path, advance: Progress) -> list[Any]:
    """The elements of a file that is one JSON array; none where it is something else."""
    with open_text(path, advance) as (text, report):
        if not text.read(1024).lstrip().startswith("["):
            return []
        text.seek(0)
        try:
            elements = json.loads(text.read())
        except UnicodeDecodeError:
            raise
        except (ValueError, RecursionError):
            return []
        report()
        return elements if isinstance(elements, list) else []
