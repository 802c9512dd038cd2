"""Texts that are named for two uses, or twice for one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class SharedTexts:
    """Texts beside others that may have files or datasets in common with them.

    Attributes:
        apart: Those of the texts that are none of the others, folders taken apart where it is needed.
        has_any: True if there is a common one.
        has_all: True if all of the others are among the texts.
    """

    apart: tuple[str, ...]
    has_any: bool
    has_all: bool


def compare_texts(texts: Sequence[str], others: Sequence[str]) -> SharedTexts:
    """Find what texts, by their names, have in common with others."""
    parts = {name: [_read(text) for text in texts_in(parse_source(name))] for name in texts}
    wanted = [_read(text) for name in others for text in texts_in(parse_source(name))]
    apart, shared = list[str](), list[tuple[TextSource, set[Path]]]()
    for name, some in parts.items():
        common = [part for part in some if any(_share_text(*part, *other) for other in wanted)]
        apart += [str(source) for source, _ in some if source not in dict(common)] if common else [name]
        shared += common
    has_all = all(any(_share_text(*part, *other) for part in shared) for other in wanted)
    return SharedTexts(tuple(apart), bool(shared), has_all)


def _read(source: TextSource) -> tuple[TextSource, set[Path]]:
    return source, {file.resolve() for file in source.files}


def _source_and_files(name: str) -> tuple[TextSource, set[Path]]:
    source = parse_source(name)
    return source, {file.resolve() for text in texts_in(source) for file in text.files}


def _share_text(one: TextSource, files: set[Path], other: TextSource, others: set[Path]) -> bool:
    """Return True if a file, or a dataset of the Hub, belongs to both, unless they name different parts of it."""
    parts = ((getattr(one, name), getattr(other, name)) for name in ("column", "split", "config", "revision"))
    if any(mine and theirs and mine != theirs for mine, theirs in parts):
        return False
    return bool(files & others) or (one.is_on_hub and one.name == other.name)
