"""Text to learn from or to measure on: files and datasets become documents.

FILE.jsonl   an object a line: {"text"}, {"question", "answer"} or {"prompt", "completion"}
FILE.json    the same, or an array of such objects
FILE.*       any other file is one document of plain text
FOLDER       a dataset saved by the library `datasets`, or a folder of data files, with the same fields as columns
ORG/NAME     a dataset of the Hub, where no such path exists

After a comma stands what else is to be known of it, see `sources`: FILE.jsonl,column=body or ORG/NAME,split=train.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.reading import HALF_A_CHARACTER
from scale_surgery.errors import MOST_LINES, DataError, counted, shorten
from scale_surgery.progress import Progress, no_progress
from scale_surgery.running.saved_datasets import read_rows
from scale_surgery.running.sources import TextSource, parse_source
from scale_surgery.running.text_files import BLANK, is_array, read_array, read_lines, read_pieces, read_text

QUESTION = ("question", "answer")
FIELDS = (("text",), QUESTION, ("prompt", "completion"))
PROMPTS = ("prompt", "question")
EXPECTED_PROMPT = 'expected {"prompt"} or {"question"}, a text'
EXPECTED = 'expected {"text"}, {"question", "answer"} or {"prompt", "completion"}, each a text'
# a text of more characters, or a file of more bytes, is read in pieces where that is asked for
LONG_TEXT = 2**20
ROWS_TOLD = 1000


@dataclass(frozen=True)
class Document:
    """A text: `prompt` is read only and may be empty, `text` is learned and scored; `source` says where it stands."""

    prompt: str
    text: str
    source: str


@dataclass(frozen=True)
class LongText:
    """A document without a prompt that is too long to be tokenized at once; its pieces can be read one time."""

    pieces: Iterable[str]
    source: str


def read_documents(paths: Sequence[str | Path], advance: Progress = no_progress) -> Iterator[Document]:
    """Read documents from files and from datasets.

    Args:
        paths: Files, folders and ids, in this order.
        advance: Called with the bytes of files that were read.

    Yields:
        The documents, those without any text left out.

    Raises:
        DataError: If a file cannot be read or has other fields; every problem of the file is named.
    """
    for source in map(parse_source, paths):
        if _holds_rows(source):
            yield from _from_rows(source, advance)
        else:
            yield from _documents([read_text(source.path, advance)], source.name)


def stream_documents(paths: Sequence[str | Path], advance: Progress = no_progress) -> Iterator[Document | LongText]:
    """Read documents, as `read_documents`, none of which need fit into memory if it is a file of plain text.

    Args:
        paths: Files, folders and ids, in this order.
        advance: Called with the bytes of files that were read.

    Yields:
        The documents, those without any text left out; long ones in pieces.

    Raises:
        DataError: If a file cannot be read or has other fields; every problem of the file is named.
    """
    for path in paths:
        source = parse_source(path)
        if _holds_rows(source) or not source.path.is_file() or source.path.stat().st_size <= LONG_TEXT:
            for document in read_documents([path], advance):
                is_long = len(document.text) > LONG_TEXT and not document.prompt
                yield LongText([document.text], document.source) if is_long else document
        elif any(piece.strip() for piece in read_pieces(source.path)):
            yield LongText(read_pieces(source.path, advance), source.name)


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
    source = parse_source(path)
    if not _holds_rows(source):
        yield from filter(str.strip, read_text(source.path).split("\n"))
        return
    names = PROMPTS if source.column is None else (source.column,)
    problems: list[str] = []
    rows, where = _rows_of(source, no_progress)
    for number, row in enumerate(rows, start=1):
        own = [row[name] for name in names if _is_text(row.get(name))] if isinstance(row, Mapping) else []
        if own:
            yield own[0]
        elif row != BLANK:
            problems.append(f"{where} {number}: {_problem(row, EXPECTED_PROMPT)}.")
    if problems:
        raise DataError.from_problems(shorten(problems))


def _holds_rows(source: TextSource) -> bool:
    """Whether a source holds objects with fields; otherwise it is plain text."""
    is_dataset = source.path.is_dir() or source.is_on_hub
    is_rows = is_dataset or source.path.suffix in (".jsonl", ".json")
    settings = ("split", "config", "revision") if is_rows else ("column", "split", "config", "revision")
    given = [name for name in settings if getattr(source, name) is not None]
    if given and not is_dataset:
        kind = "a file" if is_rows else "plain text"
        raise DataError(f"{source.name}: is {kind}, which has no {given[0]}. Leave ,{given[0]}= out.")
    return is_rows


def _rows_of(source: TextSource, advance: Progress) -> tuple[Iterable[Any], str]:
    """The objects of a file or of a dataset, and what their numbers follow."""
    if source.path.is_dir() or source.is_on_hub:
        return read_rows(source), f"{source.name}, row"
    if source.path.suffix == ".json" and is_array(source.path):
        return read_array(source.path, advance), f"{source.path}, entry"
    return read_lines(source.path, advance), f"{source.path}, line"


def _from_rows(source: TextSource, advance: Progress) -> Iterator[Document]:
    (rows, where), expected = _rows_of(source, advance), _expected(source)
    problems: list[str] = []
    more = 0
    for number, row in enumerate(rows, start=1):
        if number % ROWS_TOLD == 0:
            advance(0, counted(number, "row"))  # of a dataset nobody knows how many bytes they are
        names = _fields_of(row, source.column)
        if names is not None:
            yield from _documents([row[name] for name in names], f"{where} {number}", is_question=names == QUESTION)
        elif len(problems) < MOST_LINES:
            problems.append(f"{where} {number}: {_problem(row, expected)}.")
        else:
            more += 1  # as many as there are rows
    if problems:
        raise DataError.from_problems([*problems, *([f"... and {more} more."] if more else [])])


def _expected(source: TextSource) -> str:
    return EXPECTED if source.column is None else f'expected {{"{source.column}"}}, a text'


def _fields_of(row: Any, column: str | None) -> tuple[str, ...] | None:
    if not isinstance(row, Mapping):
        return None
    if column is not None:
        # a blank line of JSONL has no fields at all
        return ("text",) if row is BLANK else (column,) if _is_text(row.get(column)) else None
    return next((names for names in FIELDS if all(_is_text(row.get(name)) for name in names)), None)


def _is_text(value: Any) -> bool:
    # JSON can name halves of a character, which are no Unicode
    return isinstance(value, str) and not _has_half_characters(value)


def _has_half_characters(text: str) -> bool:
    return HALF_A_CHARACTER.search(text) is not None


def _problem(row: Any, expected: str) -> str:
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
