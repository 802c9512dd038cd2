"""Text to learn from or to measure on: files and saved datasets become documents.

FILE.jsonl   an object a line: {"text"}, {"question", "answer"} or {"prompt", "completion"}
FILE.json    the same, or an array of such objects
FILE.*       any other file is one document of plain text
FOLDER       a dataset saved by the library `datasets`, with the same fields as columns
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.reading import HALF_A_CHARACTER, open_regular, read_bytes
from scale_surgery.errors import DataError, shorten

QUESTION = ("question", "answer")
FIELDS = (("text",), QUESTION, ("prompt", "completion"))
PROMPTS = ("prompt", "question")
# what a blank line of JSONL is read as
BLANK = {"text": ""}
EXPECTED_PROMPT = 'expected {"prompt"} or {"question"}, a text'
EXPECTED = 'expected {"text"}, {"question", "answer"} or {"prompt", "completion"}, each a text'


@dataclass(frozen=True)
class Document:
    """A text: `prompt` is read only and may be empty, `text` is learned and scored; `source` says where it stands."""

    prompt: str
    text: str
    source: str


def read_documents(paths: Sequence[Path]) -> Iterator[Document]:
    """Read documents from files and from saved datasets.

    Args:
        paths: Files and folders, in this order.

    Yields:
        The documents, those without any text left out.

    Raises:
        DataError: If a file cannot be read or has other fields; every problem of the file is named.
    """
    for path in paths:
        if (rows := _rows_of(path)) is not None:
            yield from _from_rows(*rows)
        else:
            yield from _documents([_read_text(path)], str(path))


def read_prompts(paths: Sequence[Path]) -> list[str]:
    """Read what is to be answered; the answers in data to train on are not read.

    Args:
        paths: Files: a prompt in each line, or objects with a field "prompt" or "question" as .jsonl or .json.

    Returns:
        The prompts, in order.

    Raises:
        DataError: If a file cannot be read, has other fields or holds no prompt; every problem of the file is named.
    """
    found = []
    for path in paths:
        prompts = list(_prompts_of(path))
        if not prompts:
            raise DataError(f"{path}: holds no prompt, expected one a line.")
        found += prompts
    return found


def _prompts_of(path: Path) -> Iterator[str]:
    if (rows := _rows_of(path)) is None:
        yield from filter(str.strip, _read_text(path).split("\n"))
        return
    problems, (objects, where) = [], rows
    for number, row in enumerate(objects, start=1):
        own = [row[name] for name in PROMPTS if _is_text(row.get(name))] if isinstance(row, Mapping) else []
        if own:
            yield own[0]
        elif row != BLANK:
            problems.append(f"{where} {number}: {_problem(row, EXPECTED_PROMPT)}.")
    if problems:
        raise DataError.from_problems(shorten(problems))


def _rows_of(path: Path) -> tuple[Iterable[Any], str] | None:
    """The objects of a file or of a saved dataset, and what their numbers follow; None for plain text."""
    if path.is_dir():
        return _read_dataset(path), f"{path}, row"
    if path.suffix not in (".jsonl", ".json"):
        return None
    rows = _read_array(path) if path.suffix == ".json" else None
    return (rows, f"{path}, entry") if rows else (_read_lines(path), f"{path}, line")


def _read_text(path: Path) -> str:
    with _readable(path):
        text = read_bytes(path, most=sys.maxsize).decode("utf-8-sig")  # a byte order mark is no text
        return text.replace("\r\n", "\n").replace("\r", "\n")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file. Give UTF-8 text, JSONL or a saved dataset.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: cannot be read as text ({error}). Give UTF-8 text, JSONL or a saved dataset."
        ) from error


def _read_lines(path: Path) -> Iterator[Any]:
    with _readable(path), TextIOWrapper(open_regular(path), encoding="utf-8-sig", newline="\n") as stream:
        # texts in JSON may hold other line ends, which end no line here
        for line in stream:
            try:
                yield json.loads(line.removesuffix("\n")) if line.strip() else BLANK
            except UnicodeDecodeError:
                raise
            except (ValueError, RecursionError) as error:
                yield ValueError(str(error))


def _read_array(path: Path) -> list[Any] | None:
    """The objects of a file that is one JSON array, or None where it is none."""
    try:
        found = json.loads(_read_text(path))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) else None


def _read_dataset(path: Path) -> Iterable[Any]:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{path}: a saved dataset needs the library datasets: pip install 'scale-surgery[datasets]'."
        ) from error
    try:
        found = datasets.load_from_disk(path)
    except Exception as error:  # of datasets, and of pyarrow below it
        raise DataError(f"{path}: is no saved dataset ({error}). Give a folder that save_to_disk wrote.") from error
    if isinstance(found, datasets.DatasetDict):
        raise DataError(
            f"{path}: holds the splits {', '.join(found)}. Give the folder of one, {path}/{next(iter(found))}."
        )
    rows: Iterable[Any] = found
    return rows


def _from_rows(rows: Iterable[Any], where: str) -> Iterator[Document]:
    problems = []
    for number, row in enumerate(rows, start=1):
        names = _fields_of(row)
        if names is None:
            problems.append(f"{where} {number}: {_problem(row)}.")
        else:
            yield from _documents([row[name] for name in names], f"{where} {number}", is_question=names == QUESTION)
    if problems:
        raise DataError.from_problems(shorten(problems))


def _fields_of(row: Any) -> tuple[str, ...] | None:
    if not isinstance(row, Mapping):
        return None
    return next((names for names in FIELDS if all(_is_text(row.get(name)) for name in names)), None)


def _is_text(value: Any) -> bool:
    # JSON can name halves of a character, which are no Unicode
    return isinstance(value, str) and not _has_half_characters(value)


def _has_half_characters(text: str) -> bool:
    return HALF_A_CHARACTER.search(text) is not None


def _problem(row: Any, expected: str = EXPECTED) -> str:
    if isinstance(row, ValueError):
        return f"is not JSON ({row})"
    if not isinstance(row, Mapping):
        return f"found {type(row).__name__}, {expected}"
    if any(isinstance(value, str) and _has_half_characters(value) for value in row.values()):
        return "holds half a character (a lone surrogate), expected Unicode text"
    return f"has the fields {', '.join(map(str, row)) or 'none'}; {expected}"


def _documents(texts: Sequence[str], source: str, *, is_question: bool = False) -> Iterator[Document]:
    """The document of a text, or of a prompt and a text; nothing where there is no text."""
    *prompt, text = texts
    if text.strip():
        # the answer follows the question after a space
        yield Document("".join(prompt), f" {text.lstrip()}" if is_question else text, source)


def read_files(texts: Sequence[str | Path]) -> dict[str, list[Document]]:
    """Read texts, each file once.

    Args:
        texts: Files and saved datasets.

    Returns:
        Documents by file.

    Raises:
        DataError: If there is no file, or one cannot be read or holds no text; every such file is named.
    """
    documents: dict[str, list[Document]] = {}
    problems = [] if texts else ["There is no text to report on. Give a file with --text."]
    for file in dict.fromkeys(map(str, texts)):
        try:
            documents[file] = list(read_documents([Path(file)]))
        except DataError as error:
            problems.append(str(error))
        else:
            problems += [] if documents[file] else [f"{file}: is empty, expected at least one document with some text."]
    if problems:
        raise DataError.from_problems(problems)
    return documents
