"""A hook of mkdocs: the records stand on the site beside the pages of docs, and links between them lead there."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DATA = re.compile(r"\]\(([\w-]+\.jsonl)\)")


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the records, which lie beside docs and not in it, and the data beside them to which they link."""
    folder = Path(__file__).parent
    records = set(folder.rglob("*.md"))
    data = {record.parent / name for record in records for name in DATA.findall(record.read_text(encoding="utf-8"))}
    for file in sorted(records | data):
        name = file.relative_to(folder.parent).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(file)))


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Point links as the site lies, where benchmarks is a folder of docs."""
    if page.file.src_uri.startswith("benchmarks/"):
        return re.sub(r"\]\(((?:\.\./)+)docs/", r"](\1", markdown)
    return markdown.replace("](../benchmarks/", "](benchmarks/")
