"""Folders of texts: the files in the order of their names, each as if it were named alone.

Hidden files (.name) and descriptions of a dataset are skipped: DESCRIPTIONS, and a README.md that starts with settings
(---). Any other unreadable file is an error. Exceptions:

* A folder saved by the library `datasets` is one dataset, and so is a folder whose README.md has settings with
  `configs`.
* If the names of files indicate several splits, such as train and test, only one is read, and the user has to choose.
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

# names of splits, and the words in file names that indicate them
SPLITS = {"train": ("train", "training"), "validation": ("validation", "valid", "val", "dev"), "test": ("test", "eval")}
WORDS = {word: split for split, words in SPLITS.items() for word in words}
# a file of a split of any name, as the Hub stores datasets
SHARD = re.compile(r"data/([\w.]+)-\d{5}-of-\d{5}\b.*")
# files whose names may indicate a split; names of other files, such as code, contain these words by chance
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json")
ROWS = (*LINES, ARRAY, *TABLES, *DATA_FILES)
SPLIT_FILES = (*ROWS, ".txt")


def texts_in(source: TextSource) -> list[TextSource]:
    """Return the files and datasets of a folder, each as a text; any other text is returned alone."""
    if source.is_folder and source.revision is not None:
        raise DataError(Problem("text-without-setting", source.name, kind="a folder", setting="revision"))
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
    """Generate the files and datasets of a folder at any depth, in order."""
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
    """Return the files of the requested split, or all files if their names indicate none."""
    said = {path: _split_of(path.relative_to(source.path)) for path in paths}
    splits = _splits(said)
    # a file of rows without a split may belong to any split; a README belongs to none
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
    """Return the split that a file's name indicates, or None."""
    if suffix_of(path) not in SPLIT_FILES:
        return None
    if (shard := SHARD.fullmatch(path.as_posix())) is not None:
        return shard[1]
    words = re.split(r"[-._/0-9]", path.as_posix().lower())
    return next((WORDS[word] for word in reversed(words) if word in WORDS), None)


def _no_split(source: TextSource, unsaid: list[Path], split: str) -> Problem:
    files = [str(path.relative_to(source.path)) for path in unsaid]
    return Problem("files-without-split", source.name, files=files, split=split)
