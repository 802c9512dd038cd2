"""Files of text: plain text, at once or in pieces, and JSON lines and arrays, object by object."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO

from scale_surgery.checkpoint.reading import open_regular, read_bytes
from scale_surgery.errors import DataError
from scale_surgery.progress import Progress, no_progress

# what a blank line of JSONL is read as
BLANK = {"text": ""}
PIECE = 2**20
# an element of an array that ends in the middle of a word may go on in the next piece
LONGEST_WORD = 16


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Say of a file that it cannot be read as text.

    Raises:
        DataError: In place of errors of the system, and of bytes that are no UTF-8.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file. Give UTF-8 text, JSONL or a saved dataset.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: cannot be read as text ({error}). Give UTF-8 text, JSONL or a saved dataset."
        ) from error


def read_text(path: Path, advance: Progress = no_progress) -> str:
    """Read a file of plain text at once, with every end of a line as one character.

    Args:
        path: The file.
        advance: Called with the bytes done.

    Returns:
        The text.

    Raises:
        DataError: If it cannot be read.
    """
    with readable(path):
        content = read_bytes(path, most=sys.maxsize)
        text = content.decode("utf-8-sig")  # a byte order mark is no text
    advance(len(content))
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_pieces(path: Path, advance: Progress = no_progress) -> Iterator[str]:
    """Read plain text in pieces, with every end of a line as one character.

    Args:
        path: The file.
        advance: Called with the bytes done.

    Yields:
        The text, in order.

    Raises:
        DataError: If it cannot be read.
    """
    with readable(path), open_regular(path) as stream, TextIOWrapper(stream, encoding="utf-8-sig") as text:
        passing = _Passing(stream, advance)
        while piece := text.read(PIECE):
            yield piece
            passing()


def read_lines(path: Path, advance: Progress = no_progress) -> Iterator[Any]:
    """Read what stands in the lines of a file, each JSON of its own; an error where one is none.

    Args:
        path: The file.
        advance: Called with the bytes done.

    Yields:
        The objects, BLANK for an empty line, a ValueError for a line that is no JSON.

    Raises:
        DataError: If it cannot be read.
    """
    # texts in JSON may hold other line ends, which end no line here
    with (
        readable(path),
        open_regular(path) as stream,
        TextIOWrapper(stream, encoding="utf-8-sig", newline="\n") as text,
    ):
        passing = _Passing(stream, advance)
        for line in text:
            try:
                yield json.loads(line.removesuffix("\n")) if line.strip() else BLANK
            except UnicodeDecodeError:
                raise
            except (ValueError, RecursionError) as error:
                yield ValueError(str(error))
            passing()


def is_array(path: Path) -> bool:
    """Whether a file is one JSON array with something in it.

    Raises:
        DataError: If it cannot be read.
    """
    try:
        return sum(1 for _ in _elements(path, no_progress)) > 0
    except (ValueError, RecursionError):
        return False


def read_array(path: Path, advance: Progress = no_progress) -> Iterator[Any]:
    """Read the elements of a file that is one JSON array; see `is_array`.

    Args:
        path: The file.
        advance: Called with the bytes done.

    Yields:
        The elements.

    Raises:
        DataError: If it cannot be read.
    """
    try:
        yield from _elements(path, advance)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: has changed while it was read ({error}). Start again.") from error


def _elements(path: Path, advance: Progress) -> Iterator[Any]:
    pieces = read_pieces(path, advance)
    rest = _more("", pieces)
    if not rest.startswith("["):
        raise ValueError("no array")
    rest = _more(rest[1:], pieces)
    if rest.startswith("]"):
        rest = rest[1:]
    else:
        separator = ","
        while separator == ",":
            element, rest = _element(rest, pieces)
            yield element
            separator, rest = rest[:1], _more(rest[1:], pieces)
        if separator != "]":
            raise ValueError("no end of the array")
    if rest.strip() or any(piece.strip() for piece in pieces):
        raise ValueError("something follows the array")


def _more(rest: str, pieces: Iterator[str]) -> str:
    """What is left, from its first character that is no space."""
    while not (rest := rest.lstrip()) and (piece := next(pieces, "")):
        rest = piece
    return rest


def _element(rest: str, pieces: Iterator[str]) -> tuple[Any, str]:
    """The first element of what is left, and what follows it."""
    decoder = json.JSONDecoder()
    while True:
        error = None
        try:
            element, end = decoder.raw_decode(rest)
            if end < len(rest):
                return element, _more(rest[end:], pieces)
        except json.JSONDecodeError as found:
            error = found
            is_cut = found.msg.startswith("Unterminated string") or found.pos >= len(rest) - LONGEST_WORD
            if not is_cut:
                raise
        # twice as much, so that a long element is not read again and again
        added = "".join(piece for _, piece in zip(range(1 + len(rest) // PIECE), pieces, strict=False))
        if not added:
            raise error or ValueError("no end of the array")
        rest += added


class _Passing:
    """Tells how far a file was read."""

    def __init__(self, stream: BinaryIO, advance: Progress) -> None:
        self.stream, self.advance, self.done = stream, advance, 0

    def __call__(self) -> None:
        done = self.stream.tell()
        if done > self.done:
            self.advance(done - self.done)
            self.done = done
