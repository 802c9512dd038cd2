"""Files of text: plain text, JSON lines, other JSON and tables, each optionally compressed by gzip.

The suffix gives the format: see `LINES`, `ARRAY` and `TABLES`. A file with any other suffix is plain text. Such a file
is refused if it starts with JSON objects.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import IO, Any, TextIO, cast

from scale_surgery.checkpoint.reading import open_regular
from scale_surgery.errors import DataError, Problem
from scale_surgery.progress import Progress

# suffixes of files with a JSON value a line
LINES = (".jsonl", ".ndjson", ".jsonlines", ".jl", ".ldjson")
# suffix of a file that is one JSON array, JSON lines, or objects over several lines
ARRAY = ".json"
# suffixes of tables, with their separators
TABLES = {".csv": ",", ".tsv": "\t", ".tab": "\t"}
# separators of other programs
SEPARATORS = (",", "\t", ";", "|")
GZIP = ".gz"
# first bytes of other formats, with the format's name and the advice
FORMS = (
    (b"\xff\xfe", "UTF-16 text", "Convert it: iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "UTF-16 text", "Convert it: iconv -f UTF-16 -t UTF-8"),
    (b"\x1f\x8b", "compressed by gzip", f"Unpack it, or let its name end with {GZIP}"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", "Unpack it"),
    (b"BZh91AY&SY", "compressed by bzip2", "Unpack it"),
    (b"\xfd7zXZ", "compressed by xz", "Unpack it"),
    (b"7z\xbc\xaf", "a 7z archive", "Unpack it"),
    (b"PK\x03\x04", "a zip archive (.docx, .xlsx, .epub and .odt are some too)", "Unpack it, or save its text"),
    (b"%PDF-", "a PDF file", "Save its text"),
    (b"{\\rtf", "an RTF file", "Save its text"),
    (b"\xd0\xcf\x11\xe0", "a file of an office program", "Save its text"),
    (b"\x89PNG", "an image", "Leave it out"),
    (b"\xff\xd8\xff", "an image", "Leave it out"),
    (b"GIF87a", "an image", "Leave it out"),
    (b"GIF89a", "an image", "Leave it out"),
    (b"PAR1\x15", "a Parquet file", "Let its name end with .parquet"),
    (b"ARROW1\0", "an Arrow file", "Let its name end with .arrow"),
    (b"SQLite format 3\0", "a database", "Write its rows as JSONL"),
)
# characters that are searched for JSON under another name
BEGINNING = 2**20
# longest field of a table; Python's default limit is shorter than many texts
LONGEST_FIELD = 2**31 - 1

NO_BLANK = re.compile(r"\S")

# value of a blank line of JSONL
BLANK = {"text": ""}


@dataclass(frozen=True)
class Unread:
    """A row that cannot be read, with the reason."""

    problem: Problem


def suffix_of(path: Path) -> str:
    """Return the suffix of a file in lower case, ignoring that of gzip."""
    suffix = path.suffix.lower()
    return path.with_suffix("").suffix.lower() if suffix == GZIP else suffix


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raise DataError for errors of the system, and for bytes that are not UTF-8."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(Problem("text-not-found", path)) from error
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise DataError(Problem("text-unreadable", path, error=error)) from error


@contextmanager
def open_text(
    path: Path, advance: Progress, newline: str | None = None
) -> Iterator[tuple[TextIOWrapper, Callable[[], None]]]:
    """Open UTF-8 text; also yield a function that reports the bytes read since its last call."""
    done = 0

    def report() -> None:
        nonlocal done
        now = stream.tell()
        advance(now - done)
        done = now

    with readable(path), open_regular(path) as stream, _unpacked(path, stream) as content:
        _refuse_other_forms(path, content)
        # without a byte order mark
        with TextIOWrapper(cast(IO[bytes], content), "utf-8-sig", newline=newline) as text:
            yield text, report


def _unpacked(path: Path, stream: Any) -> Any:
    return gzip.GzipFile(fileobj=stream) if path.suffix.lower() == GZIP else stream


def _refuse_other_forms(path: Path, content: BufferedReader) -> None:
    """Refuse other formats by their first bytes."""
    beginning = content.peek(max(len(magic) for magic, _, _ in FORMS))
    for magic, form, advice in FORMS:
        if beginning.startswith(magic):
            raise DataError(Problem("text-of-other-form", path, form=form, advice=advice))


def refuse_nul(text: str, path: Path | str) -> None:
    """Refuse NUL, which occurs in archives, programs and UTF-16, and in no text."""
    if "\0" in text:
        raise DataError(Problem("text-with-nul", path))


def refuse_json(stream: TextIO, path: Path) -> None:
    """Refuse plain text that is JSON lines or a JSON array of objects, and rewind the stream."""
    if (suffix := _json_suffix(stream)) is not None:
        raise DataError(Problem("text-is-json", path, suffix=suffix))
    stream.seek(0)


def _json_suffix(stream: TextIO) -> str | None:
    """Return the suffix that fits a text of JSON rows; None for any other text."""
    text = stream.read(BEGINNING) + stream.readline()
    lines = [line for line in text.split("\n") if line.strip()]
    # a comment or a damaged row may be among them
    if sum(map(_is_object, lines)) > len(lines) / 2:
        return LINES[0]
    start = text.find("{")
    is_array = text[: max(start, 0)].strip() == "["
    if start < 0 or not (is_array or not text[:start].strip()):
        return None
    text += stream.read()
    try:
        _, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    # objects over several lines; a single object may be a row, or a notebook
    rest = text[end:].lstrip()
    if is_array or not rest or rest.startswith("{"):
        return ARRAY
    return LINES[0] if rest.startswith(",") else None


def _is_object(line: str) -> bool:
    """Return True if a line is a JSON object, optionally followed by the comma of an array."""
    try:
        return line.lstrip().startswith("{") and isinstance(json.loads(line.rstrip(", \r")), dict)
    except (ValueError, RecursionError):
        return False


def read_lines(path: Path, advance: Progress) -> Iterator[tuple[int, Any]]:
    """Read the values of JSON lines, each with its line number: BLANK for an empty line, Unread for invalid JSON."""
    # other line ends may occur inside JSON texts
    with open_text(path, advance, newline="\n") as (text, report):
        for number, line in enumerate(text, start=1):
            try:
                yield number, json.loads(line.removesuffix("\n")) if line.strip() else BLANK
            except (ValueError, RecursionError) as error:
                yield number, Unread(Problem("row-no-json", error=_reason(error)))
            report()


def _reason(error: ValueError | RecursionError) -> str:
    """Return the reason why a line is not JSON."""
    return f"{error.msg} in column {error.colno}" if isinstance(error, json.JSONDecodeError) else f"{error}"


def read_values(path: Path, advance: Progress) -> list[Any] | None:
    """Read the elements of a JSON array, or JSON values over several lines; None if it is JSON lines or no JSON."""
    with open_text(path, advance) as (stream, report):
        first = next((line for line in stream if line.strip()), "")
        if not first.lstrip().startswith(("[", "{")) or _is_object(first):
            return None
        stream.seek(0)
        text = stream.read()
        values: list[Any] = []
        position = 0
        try:
            while found := NO_BLANK.search(text, position):
                value, position = json.JSONDecoder().raw_decode(text, found.start())
                values.append(value)
        except json.JSONDecodeError as error:
            if values or not first.lstrip().startswith("["):
                return None
            raise DataError(Problem("row-no-json", f"{path}, line {error.lineno}", error=_reason(error))) from error
        except RecursionError:
            return None
        report()
    return values[0] if len(values) == 1 and isinstance(values[0], list) else values


def read_table(path: Path, advance: Progress) -> Iterator[tuple[int, Any]]:
    """Read the rows of a table, each with its first line's number: texts by column name, None if empty.

    A row that does not fit the head is Unread, since its fields cannot be assigned to columns.
    """
    separator = TABLES[suffix_of(path)]
    csv.field_size_limit(LONGEST_FIELD)
    # the csv reader handles line ends itself
    with open_text(path, advance, newline="") as (text, report):
        reader = csv.reader(text, delimiter=separator, strict=True)
        rows = _numbered(reader)
        line, head = next(rows, (1, ()))
        if (wrong := head.problem if isinstance(head, Unread) else _head_problem(head, separator)) is not None:
            raise DataError(wrong.within(f"{path}, line {line}"))
        is_bare = True
        for line, fields in rows:
            is_bare = False
            yield line, fields if isinstance(fields, Unread) else _row(head, fields, separator)
            report()
        if is_bare:
            raise DataError(Problem("table-without-rows" if head else "table-empty", path))


def _numbered(reader: Any) -> Iterator[tuple[int, Any]]:
    """Generate the non-blank rows, each with its first line's number; stop at a row that hides the next row's start."""
    line = 1
    try:
        for fields in reader:
            if fields:
                yield line, fields
            line = reader.line_num + 1
    except csv.Error as error:
        yield line, Unread(Problem("row-no-table", error=error))


def _head_problem(names: Sequence[str], separator: str) -> Problem | None:
    others = [other for other in SEPARATORS if other != separator and len(names) == 1 and other in names[0]]
    if others:
        return Problem("head-of-other-separator", head=names[0], found=others[0], separator=separator)
    twice = sorted({name for name in names if name and names.count(name) > 1})
    return Problem("column-name-twice", name=twice[0], columns=names.count(twice[0])) if twice else None


def _row(names: Sequence[str], fields: Sequence[str], separator: str) -> Any:
    if len(fields) != len(names):
        word = "tab" if separator == "\t" else "comma"
        return Unread(Problem("row-unlike-head", fields=len(fields), columns=len(names), separator=word))
    # programs that number rows leave that column's name empty
    nameless = [field for name, field in zip(names[1:], fields[1:], strict=True) if field and not name]
    if nameless:
        return Unread(Problem("column-without-name", value=nameless[0]))
    return {name: field or None for name, field in zip(names, fields, strict=True) if name}


def share_of_lines(path: Path, lines: int) -> float | None:
    """Return the share of a file's bytes in its first lines; None if the file is compressed."""
    if path.suffix.lower() == GZIP:
        return None
    with readable(path), open_regular(path) as stream:
        return sum(len(line) for _, line in zip(range(lines), stream, strict=False)) / path.stat().st_size
