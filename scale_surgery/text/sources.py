"""Names of texts: a file, a folder or a dataset of the Hub, and the part of it that is read.

NAME[,column=FIELD][,split=SPLIT][,config=CONFIG][,revision=BRANCH, TAG OR COMMIT]

An existing path takes precedence over any other reading of the name. The folder of a model is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from scale_surgery.checkpoint.names import CONFIG_FILE
from scale_surgery.checkpoint.reading import parse_json, read_bytes
from scale_surgery.errors import DataError, Problem

# advice if old text is missing
NO_OLD_TEXT = "Without any, sample some from the base: scale-surgery generate MODEL --samples 500 -o old.jsonl."
HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*")
# suffixes of names that cannot be ids of datasets
FILE_SUFFIXES = (
    *(".txt", ".text", ".md", ".rst", ".html", ".pdf", ".docx"),
    *(".json", ".jsonl", ".ndjson", ".jsonlines", ".jl", ".ldjson", ".csv", ".tsv", ".tab", ".parquet", ".arrow"),
    *(".gz", ".zst", ".bz2", ".xz", ".zip"),
)


@dataclass(frozen=True)
class TextSource:
    """The parsed name of a text.

    Attributes:
        name: A path, or the id of a dataset on the Hub.
        column: The field of each row that holds the text, in place of "text", "question" and so on.
        split: The split of a dataset.
        config: The configuration of a dataset, which the Hub also calls a subset.
        revision: The branch, tag or commit of a dataset on the Hub.
    """

    name: str
    column: str | None = None
    split: str | None = None
    config: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        parts = ((field.name, getattr(self, field.name)) for field in fields(self)[1:])
        return ",".join([self.name, *(f"{key}={value}" for key, value in parts if value is not None)])

    @property
    def path(self) -> Path:
        """The name as a path."""
        return Path(self.name)

    @property
    def is_folder(self) -> bool:
        """True if a folder of this name exists."""
        return os.path.isdir(self.name)  # noqa: PTH112, which accepts any name

    @property
    def files(self) -> list[Path]:
        """The file, or all files of the folder that are not hidden; none for a dataset of the Hub."""
        paths = sorted(self.path.rglob("*")) if self.is_folder else [self.path]
        return [path for path in paths if path.is_file() and not is_hidden(path.relative_to(self.path))]

    @property
    def bytes(self) -> int:
        """Size of its files in bytes."""
        return sum(file.stat().st_size for file in self.files)

    @property
    def is_here(self) -> bool:
        """True if a path of this name exists."""
        return os.path.exists(self.name)  # noqa: PTH110, which no name breaks

    @property
    def is_on_hub(self) -> bool:
        """True if it is a dataset of the Hub: no path of this name exists."""
        return not self.is_here and could_be_on_hub(self.name)


def is_hidden(path: Path) -> bool:
    """Return True if a path inside a folder is hidden: a name on it starts with a dot."""
    return any(part.startswith(".") for part in path.parts)


def could_be_on_hub(name: str) -> bool:
    """Return True if a name has the form of a dataset's id, not that of a file."""
    return HUB_ID.fullmatch(name) is not None and not name.lower().endswith(FILE_SUFFIXES)


def parse_source(text: str | Path) -> TextSource:
    """Parse the name of a text."""
    source = _parse(str(text))
    refuse_model(source)
    return source


def refuse_model(source: TextSource) -> None:
    """Refuse the folder of a model in place of a text."""
    if (model_type := _model_type(source.path)) is not None:
        raise DataError(Problem("text-is-model", source.name, model_type=model_type))


def which_split(source: TextSource, splits: Sequence[str]) -> Problem:
    """Return the problem of a text with several splits, or without the requested split."""
    if source.split:
        return Problem("split-unknown", source.name, split=source.split, splits=splits, first=splits[0])
    return Problem("split-not-said", source.name, splits=splits, first=splits[0])


def paths_of(texts: Iterable[str | Path]) -> list[Path]:
    """Return the paths of local texts, without the options after their names."""
    return [source.path for source in map(parse_source, texts) if source.is_here]


def _parse(whole: str) -> TextSource:
    name, *settings = whole.split(",")
    is_path = os.path.exists(whole) or not settings  # noqa: PTH110, which no name breaks
    if is_path or not all(re.match(r"\w+=.", setting) for setting in settings):
        return TextSource(whole)
    known = {field.name for field in fields(TextSource)} - {"name"}
    pairs = [setting.partition("=")[::2] for setting in settings]
    keys = [key for key, _ in pairs]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    problems = [Problem("text-setting-unknown", whole, setting=key) for key in keys if key not in known]
    problems += [Problem("text-setting-twice", whole, setting=key) for key in twice]
    if problems:
        raise DataError(*problems)
    return TextSource(name, **dict(pairs))


def _model_type(path: Path) -> object:
    """Return `model_type` of a model folder's config.json; None if there is none, as in folders of data."""
    try:
        config = parse_json(read_bytes(path / CONFIG_FILE).decode("utf-8"))
    except (OSError, ValueError):
        return None
    return config.get("model_type") if isinstance(config, dict) else None
