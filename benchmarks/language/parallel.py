"""Paragraphs that mean the same in two languages: those of LibreOffice's help, whose ids translations share."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.language.packages import ENGLISH, PACKAGES
from benchmarks.language.text import part_of, read_text, read_tree

HELP = PACKAGES[0]
# characters; a shorter one says too little, a longer one does not fit twice into a row
LEAST, MOST = 60, 300


@dataclass(frozen=True)
class Pair:
    """A paragraph in two languages."""

    old: str
    new: str


def write_pairs(work: Path, second: str) -> Path:
    """Write the pairs of the files that are held out for tests, one a line; a file that is there stays."""
    file = work / "text" / f"pairs-{second}.jsonl"
    if not file.exists():
        pairs = _find_pairs(work, second)
        file.write_text("".join(json.dumps(asdict(pair), ensure_ascii=False) + "\n" for pair in pairs), "utf-8")
    return file


def read_pairs(work: Path, second: str) -> list[Pair]:
    """Read the pairs."""
    lines = (work / "text" / f"pairs-{second}.jsonl").read_text(encoding="utf-8").splitlines()
    return [Pair(**json.loads(line)) for line in lines]


def _find_pairs(work: Path, second: str) -> list[Pair]:
    old, new = (_by_id(work, language, _held_out(work, language)) for language in (ENGLISH, second))
    pairs = {key: Pair(old[key], new[key]) for key in sorted(old.keys() & new.keys())}
    return list({pair.old: pair for pair in pairs.values() if pair.old != pair.new}.values())


def _held_out(work: Path, language: str) -> set[str]:
    """Paragraphs that stand nowhere else than in what is held out."""
    return {paragraph for text in read_text(work, language, "test") for paragraph in text.split("\n")}


def _by_id(work: Path, language: str, held_out: set[str]) -> dict[tuple[str, str], str]:
    source = HELP.of(language)
    assert source is not None
    name, pattern = source
    folder = work / "packages" / name
    return {
        (str(file.relative_to(folder)).split("/text/")[1], element.get("id", "")): text
        for file in sorted(folder.glob(pattern))
        if part_of(file) == "test" and (root := read_tree(work, file)) is not None
        for element in root.iter("p")
        if LEAST <= len(text := " ".join(element.text_content().split())) <= MOST
        if element.get("id") and text in held_out
    }
