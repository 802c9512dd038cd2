"""Files that others made: only regular ones are opened, and what is read whole has a bound.

A pipe in place of config.json would wait for a writer for ever, and /dev/zero has no end. What is read as JSON can be
written again, printed and walked through: it is not nested without end, and holds no half characters.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

# the largest that are known: a tokenizer.json of 34 MB, an index of 15 MB; a fused model of 100,000 tensors keeps the
# headers of its shards and the surgery.json of its blocks, about 100 MB
MAX_TEXT_BYTES = 256 * 1024 * 1024
# files of models have ten levels
MAX_DEPTH = 100
# tokenizers write 10**30 for a length that has no limit; a number of more than 308 digits is no float
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
    """What a file is that is no regular one, in words; None for a regular one."""
    return None if stat.S_ISREG(mode) else KINDS.get(stat.S_IFMT(mode), "no file")


def open_regular(file: Path) -> BinaryIO:
    """Open a regular file for reading; a link to one is followed."""
    try:
        _refuse_other(file.stat())
        # without waiting: what became a pipe since would wait for a writer
        handle = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except ValueError as error:
        raise OSError(f"{str(file)!a} is no name of a file") from error
    try:
        _refuse_other(os.fstat(handle))
    except OSError:
        os.close(handle)
        raise
    return os.fdopen(handle, "rb")


def _refuse_other(found: os.stat_result) -> None:
    if (kind := other_kind(found.st_mode)) is not None:
        raise OSError(f"it is {kind}, expected a regular file")


def read_bytes(file: Path, most: int = MAX_TEXT_BYTES) -> bytes:
    """Read a file whole."""
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > most:
            raise OSError(f"it has {size:,} bytes, expected at most {most:,}")
        # files of the system say that they have no bytes, and give some
        return stream.read(size)


def parse_json(text: str) -> Any:
    """Parse JSON; of a key that stands twice the last counts, as for transformers."""
    if text.startswith("\ufeff"):
        raise ValueError("it begins with a byte order mark, which transformers does not read either")
    try:
        content = json.loads(text, parse_int=_whole_number)
    except RecursionError as error:
        raise ValueError("it is nested without end") from error
    _check_depth(content)
    # most files escape nothing, and are not looked through
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
        inner = [own.values() if isinstance(own, dict) else own for own in level if isinstance(own, dict | list)]
        level = [value for values in inner for value in values]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")


def places_of_nan(content: Any, place: str = "") -> list[str]:
    """Name the places of plain JSON values that hold NaN, such as `rope_scaling.factor`."""
    if isinstance(content, dict):
        named = [(f"{place}.{key}" if place else key, value) for key, value in content.items()]
    elif isinstance(content, list):
        named = [(f"{place}[{number}]", value) for number, value in enumerate(content)]
    else:
        return [place] if isinstance(content, float) and content != content else []
    return [found for key, value in named for found in places_of_nan(value, key)]


def differing_keys(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Keys that only one of two JSON objects has, or that have other values, sorted.

    JSON has one kind of number: 1 and 1.0 are the same, also to who writes a config again. To Python false is 0; what
    reads a config may ask which of the two it is.
    """
    return sorted(
        key for key in {*one, *other} if key not in one or key not in other or not _is_same(one[key], other[key])
    )


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return not differing_keys(one, other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return isinstance(one, bool) is isinstance(other, bool) and bool(one == other)
