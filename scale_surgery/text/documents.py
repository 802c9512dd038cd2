"""Text to learn from or to measure on: files and datasets become documents.

FILE.jsonl   an object a line: {"text"}, {"question", "answer"}, {"prompt", "completion"}, {"messages"} as in a chat, or
             {"instruction", "output"} as in Alpaca, optionally with {"input"}; also .ndjson, .jsonlines, .jl, .ldjson
FILE.json    the same, also over several lines, or an array of such objects
FILE.parquet, .arrow, .csv, .tsv, .tab   the same fields as columns
FILE.*       any other file is one document of plain text
FOLDER       each of its files as if it were named alone, or a dataset saved by the library `datasets`; see `folders`
ORG/NAME     a dataset of the Hub, if no such path exists

All except Parquet and Arrow may be compressed: FILE.jsonl.gz.
Options follow after commas, see `sources`: FILE.jsonl,column=body or ORG/NAME,split=train.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from scale_surgery.checkpoint.reading import open_regular
from scale_surgery.errors import MOST_LINES, DataError, Problem, TextWarning, counted
from scale_surgery.progress import Progress, no_progress
from scale_surgery.text.conversations import (
    EMPTY,
    chat_problem,
    is_answer,
    parsed,
    with_system,
    without_empty,
    words_of,
)
from scale_surgery.text.folders import texts_in
from scale_surgery.text.saved_datasets import DATA_FILES, read_rows
from scale_surgery.text.sources import TextSource, parse_source
from scale_surgery.text.text_files import (
    ARRAY,
    BLANK,
    LINES,
    TABLES,
    Unread,
    open_text,
    read_lines,
    read_table,
    read_values,
    readable,
    refuse_json,
    refuse_nul,
    suffix_of,
)
from scale_surgery.text.values import fields_problem, kind_of, text_problem

QUESTION = ("question", "answer")
ALPACA = ("instruction", "output")
# sets of fields; the first that fits a row is used
FIELDS = (("text",), QUESTION, ("prompt", "completion"), ("messages",), ALPACA)
TEXTS = frozenset(("input", *chain.from_iterable(FIELDS))) - {"messages"}
# start of a list of messages as a text, in JSON or as Python prints it
MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](?:role|content)["']\s*:""")
PROMPTS = ("prompt", "question")
EXPECTED_PROMPT = '{"prompt"} or {"question"}, a text'
EXPECTED = '{"text"}, {"question", "answer"}, {"prompt", "completion"}, {"messages"} or {"instruction", "output"}'
# the usual prompts of Alpaca
TASK = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
TASK_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n"
    "### Response:\n"
)
# longer texts are tokenized in pieces that end at a line: the tokenizer needs more than a hundred bytes for each
# character
LONG_TEXT = 2**20
PIECE = 2**16
ROWS_A_REPORT = 1000


@dataclass(frozen=True)
class Document:
    """A text: `prompt` is read only and may be empty, `text` is learned and scored; `source` names its place in errors.

    A conversation also has `chat`, the template's input: its messages, and tools if there are any. `text` then holds
    the words of the assistant, and its `prompt` all other words. If `goes_on`, the next document continues the text.
    """

    prompt: str
    text: str
    source: str
    chat: Mapping[str, Any] | None = None
    goes_on: bool = False

    @property
    def is_plain(self) -> bool:
        """True if it is one text, all of which is learned."""
        return not self.prompt and self.chat is None


def read_documents(
    paths: Sequence[str | Path], advance: Progress = no_progress, *, whole: bool = True
) -> Iterator[Document]:
    """Read documents from files and from datasets."""
    for text in chain.from_iterable(map(texts_in, map(parse_source, paths))):
        yield from read_text(text, advance, whole=whole)


def read_text(source: TextSource, advance: Progress = no_progress, *, whole: bool = True) -> Iterator[Document]:
    """Read the documents of one file or dataset."""
    return _from_rows(source, advance) if holds_rows(source) else _from_text(source, advance, whole=whole)


def _from_text(source: TextSource, advance: Progress, *, whole: bool) -> Iterator[Document]:
    with open_text(source.path, advance) as (stream, report):
        refuse_json(stream, source.path)
        text = stream.read(-1 if whole else LONG_TEXT + 1)
        refuse_nul(text, source.path)
        if whole or len(text) <= LONG_TEXT:
            report()
            yield from _documents({"text": text}, ("text",), source.name)
        else:
            stream.seek(0)
            for piece in _pieces(stream, source.name):
                refuse_nul(piece.text, source.path)
                report()
                yield piece


def in_pieces(document: Document) -> Iterable[Document]:
    """Return the pieces in which a document is tokenized: the document itself, unless it is a long text."""
    is_long = document.is_plain and len(document.text) > LONG_TEXT and not document.goes_on
    return _pieces(StringIO(document.text), document.source) if is_long else (document,)


def _pieces(text: TextIO, source: str) -> Iterator[Document]:
    """Split a long text into pieces; blank lines at its start belong to the first piece, and a blank text has none."""
    piece, is_begun = "", False
    while more := text.read(PIECE) + text.readline(PIECE):
        if is_begun := is_begun or bool(piece.strip()):
            yield Document("", piece, source, goes_on=True)
            piece = ""
        piece += more
    if is_begun or piece.strip():
        yield Document("", piece, source)


def read_questions(paths: Sequence[Path]) -> list[str]:
    """Read prompts, one per line or row; answers in the same rows are ignored."""
    questions = []
    for path in paths:
        prompts = list(_prompts_of(path))
        if not prompts:
            raise DataError(Problem("file-without-prompts", path))
        questions += prompts
    return questions


def _prompts_of(path: Path) -> Iterator[str]:
    for text in texts_in(parse_source(path)):
        yield from _prompts_in_rows(text) if holds_rows(text) else prompts_in_text(text)


def prompts_in_text(source: TextSource) -> Iterator[str]:
    """Read the prompts of a plain text, one per line."""
    with open_text(source.path, no_progress) as (stream, _):
        refuse_json(stream, source.path)
        text = stream.read()
        refuse_nul(text, source.path)
        yield from (line for line in text.split("\n") if line.strip())


def _prompts_in_rows(source: TextSource) -> Iterator[str]:
    names = PROMPTS if source.column is None else (source.column,)
    problems: list[Problem] = []
    for place, row in rows_of(source, no_progress):
        texts = [row.get(name) for name in names] if isinstance(row, Mapping) else []
        prompt = next((text for text in texts if text_problem(text, "") is None), None)
        if prompt is not None and row.get("system") is not None:
            problems.append(Problem("prompt-with-system", place))
        elif prompt is not None:
            yield prompt
        elif row != BLANK:
            problems.append(row_problem(place, row, names, EXPECTED_PROMPT))
    if problems:
        raise DataError(*problems)


def _is_dataset(source: TextSource) -> bool:
    return source.is_folder or source.is_on_hub or source.path.suffix.lower() in DATA_FILES


def holds_rows(source: TextSource) -> bool:
    """Return True if a source holds objects with fields, False if it is plain text."""
    is_rows = _is_dataset(source) or suffix_of(source.path) in (*LINES, ARRAY, *TABLES)
    settings = ("split", "config", "revision") if is_rows else ("column", "split", "config", "revision")
    given = [name for name in settings if getattr(source, name) is not None]
    if given and not (source.is_folder or source.is_on_hub):
        kind = "a file" if is_rows else "plain text"
        raise DataError(Problem("text-without-setting", source.name, kind=kind, setting=given[0]))
    return is_rows


def rows_of(source: TextSource, advance: Progress) -> Iterator[tuple[str, Any]]:
    """Read the rows of a file or dataset, each with a phrase for its place."""
    path, suffix = source.path, suffix_of(source.path)
    entries = read_values(path, advance) if suffix == ARRAY and not _is_dataset(source) else None
    if _is_dataset(source):
        if not (source.is_folder or source.is_on_hub):
            with readable(path), open_regular(path):
                pass  # if it is no regular file, raise a clearer error than the library's
        rows: Iterator[tuple[int, Any]] = enumerate(read_rows(source), start=1)
        word = "row"
    elif entries is not None:
        word, rows = "entry", enumerate(entries, start=1)
    else:
        word, rows = "line", read_table(path, advance) if suffix in TABLES else read_lines(path, advance)
    return ((f"{source.name}, {word} {number}", row) for number, row in rows)


def _from_rows(source: TextSource, advance: Progress) -> Iterator[Document]:
    column = source.column
    names, expected = FIELDS if column is None else ((column,),), EXPECTED
    if column is not None:
        expected = f'{{"{column}"}}, a text or messages'
    every = tuple(chain.from_iterable(map(_with_optional, names)))
    problems: list[Problem] = []
    more = 0
    first_silent, silent, is_empty = "", 0, True
    for number, (place, row) in enumerate(rows_of(source, advance), start=1):
        if number % ROWS_A_REPORT == 0:
            advance(0, counted(number, "row"))  # the size of a dataset in bytes is unknown
        # a blank line of JSONL has no fields at all
        fields = ("text",) if row is BLANK else _fields_of(row, names)
        if fields is not None:
            documents = list(_documents(row, fields, place))
            yield from documents
            is_empty = is_empty and not documents
            if not documents and _messages_of(row, fields) is not None:
                first_silent, silent = first_silent or place, silent + 1
        elif len(problems) < MOST_LINES:
            problems.append(row_problem(place, row, every, expected))
        else:
            more += 1  # every row may have one
    if problems:
        raise DataError(*problems, *([Problem("rows-more", source.name, more=more)] if more else []))
    if silent:
        unanswered = Problem("conversation-unanswered", first_silent, conversations=silent)
        if is_empty:
            raise DataError(unanswered)
        warnings.warn(f"{unanswered.phrase}. Such conversations are left out.", TextWarning, stacklevel=2)


def _fields_of(row: Any, known: Sequence[tuple[str, ...]]) -> tuple[str, ...] | None:
    """Return the first known set of fields that a row has; a set with a non-empty text comes first."""
    if not isinstance(row, Mapping):
        return None
    present = [names for names in known if all(name in row for name in names)]
    fits = [names for names in present if all(_field_problem(row, name) is None for name in _with_optional(names))]
    filled = (names for names in fits if isinstance(row[names[-1]], list) or row[names[-1]].strip())
    return next(filled, fits[0] if fits else None)


def _with_optional(names: tuple[str, ...]) -> tuple[str, ...]:
    return (*names, "input") if names == ALPACA else names


def _field_problem(row: Mapping[str, Any], name: str) -> Problem | None:
    """Return the problem of a field, or None."""
    value = row.get(name)
    if holds_messages(name, value):
        return chat_problem(row, name)
    return None if name == "input" and value is None else text_problem(value, name)


def holds_messages(name: str, value: Any) -> bool:
    """Return True for the field "messages", and for a field of a free name with a list or a text of messages."""
    could_be = MESSAGES.match(value) is not None if isinstance(value, str) else isinstance(value, list)
    return name == "messages" or (could_be and name not in TEXTS)


def row_problem(place: str, row: Any, names: Iterable[str], expected: str) -> Problem:
    """Return the problem of a row that fits none of the known fields."""
    if isinstance(row, Unread):
        return row.problem.within(place)
    if not isinstance(row, Mapping):
        return Problem("value-unfit", place, value=kind_of(row), kind=expected)
    # a field without a value is named only if nothing else is wrong
    given = sorted((name for name in names if name in row), key=lambda name: row[name] is None)
    wrong = (_field_problem(row, name) for name in given)
    first = next(filter(None, wrong), None)
    return first.within(place) if first else fields_problem(row, expected, place)


def _documents(row: Mapping[str, Any], names: tuple[str, ...], source: str) -> Iterator[Document]:
    """Return the document of a row; none if it has nothing to learn."""
    if (messages := _messages_of(row, names)) is not None:
        yield from _conversation(row, messages, source)
        return
    *prompt, text = (row[name] for name in names)
    if names == ALPACA:
        task = {name: row.get(name) or "" for name in ("instruction", "input")}
        prompt = [(TASK_WITH_INPUT if task["input"].strip() else TASK).format(**task)]
    if text.strip():
        # the answer follows the question after a space
        yield Document("".join(prompt), f" {text.lstrip()}" if names == QUESTION else text, source)


def _messages_of(row: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """Return the messages of a row, decoded if they are a JSON text; None if it is no conversation."""
    return parsed(row[names[0]]) if holds_messages(names[0], row[names[0]]) else None


def _conversation(row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], source: str) -> Iterator[Document]:
    turns = [without_empty(message) for message in with_system(row, messages)]
    words: dict[bool, list[str]] = {False: [], True: []}
    for place, message in enumerate(turns):
        words[is_answer(place, message)].append(words_of(message))
    if words[True]:
        tools = {} if row.get("tools") in EMPTY else {"tools": row["tools"]}
        yield Document("\n".join(words[False]), "\n".join(words[True]), source, {"messages": turns, **tools})


def read_files(texts: Sequence[str | Path]) -> dict[str, list[Document]]:
    """Read texts, each file once."""
    documents: dict[str, list[Document]] = {}
    problems = [] if texts else [Problem("report-without-text")]
    for file in dict.fromkeys(map(str, texts)):
        try:
            documents[file] = list(read_documents([Path(file)]))
        except DataError as error:
            problems += error.problems
        else:
            problems += [] if documents[file] else [Problem("text-empty", file)]
    if problems:
        raise DataError(*problems)
    return documents
