"""Texts that are named for two uses, or twice for one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path

from scale_surgery.errors import Problem
from scale_surgery.text.folders import texts_in
from scale_surgery.text.sources import TextSource, parse_source


def texts_of_two_uses(uses: Mapping[str, tuple[Sequence[str], Mapping[str, Sequence[str]]]]) -> Iterator[Problem]:
    """Yield texts that are measured and have another use as well.

    Args:
        uses: By option, the texts that are measured, and others by their options that may have none of them.
    """
    read = cache(_source_and_files)  # a folder is listed once
    for measured, (texts, others) in uses.items():
        for option, used in others.items():
            for name in texts:
                if any(_share_text(*read(name), *read(other)) for other in used):
                    yield Problem("text-of-two-uses", name, measured=measured, trained=option)


def texts_named_twice(option: str, texts: Sequence[str | Path]) -> Iterator[Problem]:
    """Yield texts of one option that another text of it contains: what is measured twice is no more evidence."""
    read = cache(_source_and_files)
    for one, other in combinations(map(str, texts), 2):
        if _share_text(*read(one), *read(other)):
            yield Problem("text-twice", other, option=option, other=one)


def share_text(one: str, other: str) -> bool:
    """Return True if two texts, by their names, have a file or a dataset in common."""
    return _share_text(*_source_and_files(one), *_source_and_files(other))


def _source_and_files(name: str) -> tuple[TextSource, set[Path]]:
    source = parse_source(name)
    return source, {file.resolve() for text in texts_in(source) for file in text.files}


def _share_text(one: TextSource, files: set[Path], other: TextSource, others: set[Path]) -> bool:
    """Return True if a file, or a dataset of the Hub, belongs to both, unless they name different parts of it."""
    parts = ((getattr(one, name), getattr(other, name)) for name in ("column", "split", "config", "revision"))
    if any(mine and theirs and mine != theirs for mine, theirs in parts):
        return False
    return bool(files & others) or (one.is_on_hub and one.name == other.name)
