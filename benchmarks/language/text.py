"""Paragraphs out of documentation: HTML, Mallard and manual pages, in one language, each paragraph once.

What a language is told by is small: its script, or its commonest words against those of English. A file of a
translation holds paragraphs that nobody has translated yet, so paragraphs are judged and not files.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from lxml import etree, html

from benchmarks.language.packages import ENGLISH, KINDS, MANUAL_READER, fetch, files_of

Part = Literal["train", "dev", "test"]
# hundredths of the names of files that are held out
DEV, TEST = 3, 3

BLOCKS = {
    *("p", "li", "dd", "dt", "td", "th", "h1", "h2", "h3", "h4", "h5", "h6", "title", "caption", "figcaption"),
    *("div", "section", "body", "note", "item", "blockquote", "article"),
}
# what is not prose
SKIPPED = {
    *("script", "style", "nav", "pre", "head", "screen", "listing", "aside", "header", "footer", "info"),
    "table_of_contents",
}

LETTER, WORD = re.compile(r"[^\W\d_]"), re.compile(r"[^\W\d_]+")
SCRIPTS = {"ja": "[ぁ-んァ-ヶ]", "ko": "[가-힣]", "ru": "[а-яёА-ЯЁ]"}
LEAST_OF_SCRIPT = 0.15
COMMON = {
    "en": "the of and to is a that for be this with are or as by it on not can if from you will an",
    "de": "der die das und ist nicht ein eine einen zu den von mit für auf wird werden sie im dem sich des oder als "
    "auch aus bei wenn kann dass wie es",
    "fr": "le la les de des du et est une un pas que qui pour dans sur en avec par au aux ce cette sont ou vous il se",
}
COMMON_WORDS = {language: frozenset(words.split()) for language, words in COMMON.items()}
LEAST_LETTERS, LEAST_SHARE, LEAST_COMMON = 20, 0.6, 0.08


def write_texts(work: Path, second: str) -> None:
    """Fetch and write the text of English and of the language that is learned."""
    work.mkdir(parents=True, exist_ok=True)
    fetch(work, (ENGLISH, second))
    for language in (ENGLISH, second):
        write_text(work, language)


def write_text(work: Path, language: str) -> None:
    """Write the paragraphs of a language, one document a line, for training and held out."""
    folder = work / "text"
    # text that is there stays as it is
    if all(text_file(work, language, part).exists() for part in ("train", "dev", "test")):
        return
    folder.mkdir(exist_ok=True)
    lines: dict[Part, list[str]] = {"train": [], "dev": [], "test": []}
    for package, file, paragraphs in documents(work, language):
        document = {"package": package, "file": file.name, "text": "\n".join(paragraphs)}
        lines[part_of(file)].append(json.dumps(document, ensure_ascii=False) + "\n")
    for part, part_lines in lines.items():
        text_file(work, language, part).write_text("".join(part_lines), encoding="utf-8")


def text_file(work: Path, language: str, part: Part) -> Path:
    """Where the text of a language lies."""
    return work / "text" / f"{language}.{part}.jsonl"


def read_text(work: Path, language: str, part: Part) -> list[str]:
    """Read the documents of a language."""
    lines = text_file(work, language, part).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


def part_of(file: Path) -> Part:
    """Which part a file belongs to: its name decides, so that translations are held out together."""
    share = int(hashlib.sha256(file.name.encode()).hexdigest()[:8], 16) % 100
    return "dev" if share < DEV else "test" if share < DEV + TEST else "train"


def documents(work: Path, language: str) -> Iterator[tuple[str, Path, list[str]]]:
    """Yield package, file and new paragraphs of everything that is written in a language."""
    seen: set[bytes] = set()
    for package, file in files_of(work, language):
        kept = []
        for paragraph in paragraphs_of(work, file):
            key = hashlib.sha256(paragraph.encode()).digest()[:8]
            if key not in seen and is_in(language, paragraph):
                seen.add(key)
                kept.append(paragraph)
        if kept:
            yield package, file, kept


def paragraphs_of(work: Path, file: Path) -> list[str]:
    """Read the paragraphs of a file."""
    root = read_tree(work, file)
    if root is None:
        return []
    body = root.find("body")
    return list(_blocks(root if body is None else body))


def read_tree(work: Path, file: Path) -> etree._Element | None:
    """Parse a file; None where nothing is in it."""
    content = file.read_bytes()
    kind = KINDS[file.suffix]
    if kind == "manual":
        content = _manual(work, gzip.decompress(content))
    if not content.strip():
        return None
    if kind == "xml":
        return etree.fromstring(content, etree.XMLParser(recover=True, resolve_entities=False))
    return html.document_fromstring(content, parser=html.HTMLParser(encoding="utf-8"))


def _manual(work: Path, content: bytes) -> bytes:
    # a page that only includes another one is read where that one is
    if content.startswith(b".so "):
        return b""
    reader = work / "packages" / MANUAL_READER / "usr/bin/mandoc"
    return subprocess.run([reader, "-T", "html", "-K", "utf-8"], input=content, capture_output=True).stdout


def _blocks(root: etree._Element) -> Iterator[str]:
    """Yield the text of each block, without what is in blocks inside it."""
    buffer: list[str] = []

    def flush() -> Iterator[str]:
        if text := " ".join("".join(buffer).split()):
            yield text
        buffer.clear()

    def walk(element: etree._Element) -> Iterator[str]:
        # comments have no name
        if not isinstance(element.tag, str) or (name := etree.QName(element).localname.lower()) in SKIPPED:
            return
        if name in BLOCKS:
            yield from flush()
        buffer.append(element.text or "")
        for child in element:
            yield from walk(child)
            buffer.append(child.tail or "")
        if name in BLOCKS:
            yield from flush()

    yield from walk(root)
    yield from flush()


def is_in(language: str, paragraph: str) -> bool:
    """Whether a paragraph is prose of a language."""
    letters = len(LETTER.findall(paragraph))
    if script := SCRIPTS.get(language):
        return len(re.findall(script, paragraph)) >= max(4, LEAST_OF_SCRIPT * letters)
    if letters < max(LEAST_LETTERS, LEAST_SHARE * len(paragraph.replace(" ", ""))):
        return False
    if any(len(re.findall(script, paragraph)) for script in SCRIPTS.values()):
        return False
    words = WORD.findall(paragraph.lower())
    return _common(language, words) >= LEAST_COMMON * len(words) and all(
        _common(language, words) > _common(rival, words) for rival in (ENGLISH, language) if rival != language
    )


def _common(language: str, words: Sequence[str]) -> int:
    return sum(word in COMMON_WORDS[language] for word in words)
