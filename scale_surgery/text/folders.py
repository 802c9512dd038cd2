"""What a folder of texts holds: its files in the order of their names, each as if it were named alone.

Not read are hidden files (.name) and what describes a dataset: DESCRIPTIONS, and a README.md that begins with settings
(---). What else cannot be read is an error. Exceptions:

* A folder that the library `datasets` saved is one dataset; so is one whose README.md has settings with `configs`.
* If names of files say several splits, such as train and test, one split is read, and which has to be said.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from scale_surgery.checkpoint.names import CONFIG_FILE
from scale_surgery.errors import DataError, Problem
from scale_surgery.text.saved_datasets import CARD, DATA_FILES, is_dataset, settings_of
from scale_surgery.text.sources import TextSource, is_hidden, refuse_model, which_split
from scale_surgery.text.text_files import ARRAY, LINES, TABLES, readable, suffix_of

# names of splits, and the words by which a name says them
SPLITS = {"train": ("train", "training"), "validation": ("validation", "valid", "val", "dev"), "test": ("test", "eval")}
WORDS = {word: split for split, words in SPLITS.items() for word in words}
# a split of any name, as datasets of the Hub are stored
SHARD = re.compile(r"data/([\w.]+)-\d{5}-of-\d{5}\b.*")
# files whose names may say splits; those of others, such as code, may say anything
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json")
ROWS = (*LINES, ARRAY, *TABLES, *DATA_FILES)
SPLIT_FILES = (*ROWS, ".txt")


def texts_in(source: TextSource) -> list[TextSource]:
    """The files and datasets of a folder, each as a text; of all others the text itself."""
    if not source.is_folder or is_dataset(source.path):
        return [source]
    if source.config is not None:
        raise DataError(Problem("text-without-setting", source.name, kind="a folder of files", setting="config"))
    paths = list(_walk(source.path))
    if not paths:
        raise DataError(Problem("folder-without-texts", source.name))
    texts = [TextSource(str(path), source.column) for path in _of_split(source, paths)]
    for text in texts:
        refuse_model(text)
    return texts


def _walk(folder: Path) -> Iterator[Path]:
    """Files and datasets of a folder at any depth, in order."""
    with readable(folder):
        paths = sorted(folder.iterdir())
    for path in paths:
        if is_hidden(Path(path.name)):
            continue
        if not path.is_dir():
            if path.name not in DESCRIPTIONS and not (path.name == CARD and settings_of(path)):
                yield path
        elif path.is_symlink():
            raise DataError(Problem("link-to-folder", path))
        elif is_dataset(path) or (path / CONFIG_FILE).is_file():
            yield path
        else:
            yield from _walk(path)


def _of_split(source: TextSource, paths: list[Path]) -> list[Path]:
    """The files of the split that is asked for; all of them where their names say none."""
    said = {path: _split_of(path.relative_to(source.path)) for path in paths}
    splits = _splits(said)
    # a file of rows without a split may belong to each; a README does not
    unsaid = [path for path in paths if said[path] is None and suffix_of(path) in ROWS]
    if source.split is None:
        if len(splits) > 1:
            raise DataError(which_split(source, splits))
        if unsaid and splits not in ([], ["train"]):
            raise DataError(_no_split(source, unsaid, splits[0]))
        return paths
    if source.split not in (splits or ["train"]):
        raise DataError(which_split(source, splits or ["train"]))
    if splits and unsaid:
        raise DataError(_no_split(source, unsaid, source.split))
    return [path for path in paths if said[path] == source.split] if splits else paths


def _splits(said: Mapping[Path, str | None]) -> list[str]:
    found = {split for split in said.values() if split is not None}
    return [*(split for split in SPLITS if split in found), *sorted(found - set(SPLITS))]


def _split_of(path: Path) -> str | None:
    """The split that the name of a file of rows says; None for a name that says none."""
    if suffix_of(path) not in SPLIT_FILES:
        return None
    if (shard := SHARD.fullmatch(path.as_posix())) is not None:
        return shard[1]
    words = re.split(r"[-._/0-9]", path.as_posix().lower())
    return next((WORDS[word] for word in reversed(words) if word in WORDS), None)


def _no_split(source: TextSource, unsaid: list[Path], split: str) -> Problem:
    files = [str(path.relative_to(source.path)) for path in unsaid]
    return Problem("files-without-split", source.name, files=files, split=split)
