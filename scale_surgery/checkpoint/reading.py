"""Read untrusted files: regular files only, and up to a maximum size.

A pipe in place of config.json would wait for a writer for ever, and /dev/zero has no end. Parsed JSON can be written
again: its depth is bounded, and it has no lone surrogates.
"""

from __future__ import annotations

import gc
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

# largest known files: a tokenizer.json of 34 MB, an index of 15 MB. A fused model of 100,000 tensors has a file of
# about 100 MB, with the headers of its shards and the surgery.json of its blocks.
MAX_TEXT_BYTES = 256 * 1024 * 1024
# files of models have about ten levels
MAX_DEPTH = 100
# tokenizers write 10**30 for an unlimited length; a float has at most 308 digits before the point
MAX_DIGITS = 100
HALF_A_CHARACTER = re.compile("[\ud800-\udfff]")
KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def other_kind(mode: int) -> str | None:
    """Return the kind of a file that is not regular, in words, or None for a regular file."""
    return None if stat.S_ISREG(mode) else KINDS.get(stat.S_IFMT(mode), "no file")


def open_regular(file: Path) -> BinaryIO:
    """Open a regular file for reading. Links to regular files are followed."""
    try:
        _refuse_other(file.stat())
        # non-blocking: if the file was replaced by a pipe meanwhile, opening would wait for a writer
        handle = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except ValueError as error:
        raise OSError(f"{str(file)!a} is no name of a file") from error
    try:
        _refuse_other(os.fstat(handle))
    except OSError:
        os.close(handle)
        raise
    return os.fdopen(handle, "rb")


def _refuse_other(status: os.stat_result) -> None:
    if (kind := other_kind(status.st_mode)) is not None:
        raise OSError(f"it is {kind}, expected a regular file")


def read_bytes(file: Path, most: int = MAX_TEXT_BYTES) -> bytes:
    """Read a file whole."""
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > most:
            raise OSError(f"it has {size:,} bytes, expected at most {most:,}")
        # bounded: files in /proc have more bytes than their size says
        return stream.read(size)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector while many lasting objects are created."""
    # each collection visits all objects of torch and transformers, which dominates the loading of a large tokenizer
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def parse_json(text: str) -> Any:
    """Parse JSON. Of repeated keys the last counts, as in transformers."""
    if text.startswith("\ufeff"):
        raise ValueError("it begins with a byte order mark, which transformers does not read either")
    try:
        with collector_paused():
            content = json.loads(text, parse_int=_whole_number)
    except RecursionError as error:
        raise ValueError("it is nested without end") from error
    _check_depth(content)
    # most files have no escapes and need no search
    if "\\u" in text and (half := HALF_A_CHARACTER.search(json.dumps(content, ensure_ascii=False))):
        raise ValueError(f"it holds half a character, {half[0]!a}, expected Unicode text")
    return content


def _whole_number(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"it holds a number of {len(digits)} digits, expected at most {MAX_DIGITS}")
    return int(digits)


def _check_depth(content: Any) -> None:
    level = [content]
    for _ in range(MAX_DEPTH):
        nested = (value for value in level if isinstance(value, dict | list))
        level = [inner for value in nested for inner in (value.values() if isinstance(value, dict) else value)]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")


def places_of_nan(content: Any, place: str = "") -> list[str]:
    """Return the paths of NaN in plain JSON values, such as `rope_scaling.factor`."""
    if isinstance(content, dict):
        named = [(f"{place}.{key}" if place else key, value) for key, value in content.items()]
    elif isinstance(content, list):
        named = [(f"{place}[{number}]", value) for number, value in enumerate(content)]
    else:
        return [place] if isinstance(content, float) and content != content else []
    return [inner for key, value in named for inner in places_of_nan(value, key)]


def differing_keys(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Return the sorted keys that are in only one of two JSON objects, or that differ in value."""
    # JSON has one type of number, so 1 equals 1.0. false and 0 differ, although Python compares them as equal.
    return sorted(key for key in {*a, *b} if key not in a or key not in b or not _is_same(a[key], b[key]))


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return not differing_keys(a, b)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return isinstance(a, bool) is isinstance(b, bool) and bool(a == b)
