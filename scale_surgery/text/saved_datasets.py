"""Rows of datasets, read by the library `datasets`: saved datasets, Parquet and Arrow files, and datasets of the Hub.

No code of a dataset runs, and formats that may contain pickles are not read.

Arrow gives each object the keys of all objects of its column, with null for missing values. Such nulls are dropped.
Arrow itself loses explicit nulls, the order of keys, and the type of 1 if another row has 1.5.
"""

from __future__ import annotations

import glob
import hashlib
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.reading import open_regular
from scale_surgery.errors import DataError, Problem
from scale_surgery.text.sources import TextSource, which_split
from scale_surgery.text.text_files import Unread

# formats of data files with rows of text and plain values
FORMATS = ("json", "parquet", "csv", "text", "arrow")
# suffixes of data files, and the name of their format in the library
DATA_FILES = {".parquet": "parquet", ".arrow": "arrow"}
# files that identify a saved dataset, of one split or of several
SAVED_FILES = ("state.json", "dataset_dict.json")
# card of a dataset, and the settings at its start
CARD = "README.md"
SETTINGS = re.compile(rb"---\r?\n(.*?)\n---", re.DOTALL)
MOST_SETTINGS = 2**20
# columns that may hold nested values
NESTED = ("messages", "tools")
# columns that belong to a conversation or an instruction in another one
BESIDE = ("system", "tools")
JSON_KINDS = (str, int, float, list, dict, type(None))
# most characters of a library's error that are quoted
LONGEST = 300


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Silence progress bars and messages of `datasets`."""
    import datasets

    verbosity, was_shown = datasets.logging.get_verbosity(), datasets.is_progress_bar_enabled()
    datasets.logging.set_verbosity_error()
    datasets.disable_progress_bar()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if was_shown:
            datasets.enable_progress_bar()


def is_dataset(folder: Path) -> bool:
    """Return True if a folder is one dataset: saved by `datasets`, or with a card that assigns files to splits."""
    return _is_saved(folder) or b"\nconfigs:" in b"\n" + settings_of(folder / CARD)


def settings_of(card: Path) -> bytes:
    """Return the settings at the start of a dataset's card; empty for any other file."""
    try:
        with open_regular(card) as content:
            match = SETTINGS.match(content.read(MOST_SETTINGS))
    except OSError:
        return b""
    return match[1] if match else b""


def read_rows(source: TextSource) -> Iterator[Any]:
    """Read the rows of a dataset in order; a row is Unread if JSON cannot hold its values."""
    with quiet_datasets():
        rows = _load(source)
    features = rows.features or {}
    nested = NESTED if source.column is None else (*NESTED, source.column)
    try:
        for row in _strictly(rows, source.name):
            yield _as_written(row, features, nested)
    except DataError:
        raise
    except Exception as error:  # from datasets, from pyarrow below it, and from the network
        raise DataError(_broken_off(source, error)) from error


def _strictly(rows: Any, name: str) -> Iterator[Any]:
    """Generate the rows; raise an error if pandas would drop surplus fields of a row."""
    from pandas.errors import ParserWarning

    each = iter(rows)
    while True:
        with warnings.catch_warnings():
            warnings.simplefilter("error", ParserWarning)
            try:
                row = next(each, None)
            except ParserWarning as error:
                raise DataError(Problem("rows-longer-than-head", name)) from error
        if row is None:
            return
        yield row


def _as_written(row: Mapping[str, Any], features: Mapping[str, Any], nested: tuple[str, ...]) -> Any:
    written = {name: _without_nulls(value, features.get(name)) for name, value in row.items()}
    for name in nested:
        if (other := _other_kind(written.get(name))) is not None:
            kind = type(other).__name__
            return Unread(Problem("value-unlike-json", f'"{name}"', kind=kind, value=str(other)))
    return written


def _without_nulls(value: Any, feature: Any) -> Any:
    """Return a value without the nulls that Arrow added; a value stored as JSON is returned unchanged."""
    if type(feature).__name__ == "Json":
        return value
    if isinstance(value, dict):
        features = feature if isinstance(feature, dict) else {}
        return {key: _without_nulls(each, features.get(key)) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
        return [_without_nulls(each, inner) for each in value]
    return value


def _other_kind(value: Any) -> Any:
    """Return the first nested value that JSON cannot hold, such as a date, or None."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return next((other for each in inner if (other := _other_kind(each)) is not None), None)
    return None if isinstance(value, JSON_KINDS) else value


def share_of_rows(source: TextSource, rows: int) -> float | None:
    """Return the approximate share of a dataset in its first rows; None if that requires reading all of it."""
    from pyarrow.parquet import read_metadata

    try:
        with quiet_datasets():
            if _is_saved(source.path):
                return rows / len(_saved(source))
            files = _data_files(source)
        suffixes = {file.suffix.lower() for file in files}
        if suffixes == {".parquet"}:
            return rows / sum(int(read_metadata(file).num_rows) for file in files)
        return rows / sum(map(_arrow_rows, files)) if suffixes == {".arrow"} else None
    except DataError:
        raise
    except Exception as error:  # from pyarrow, about a file after those rows
        raise DataError(_broken_off(source, error)) from error


def _data_files(source: TextSource) -> list[Path]:
    """Return the files that are read; a folder may hold others."""
    if not source.is_folder:
        return [source.path]
    splits = _builder(source).config.data_files
    return list(map(Path, splits[next(iter(splits)) if source.split is None else source.split]))


def _arrow_rows(file: Path) -> int:
    import pyarrow

    # reads the headers of all batches, and no batch
    with pyarrow.memory_map(str(file)) as content:
        try:
            return int(pyarrow.ipc.open_stream(content).read_all().num_rows)
        except pyarrow.ArrowInvalid:
            return int(pyarrow.ipc.open_file(content).read_all().num_rows)


def digest_of(source: TextSource) -> str:
    """Return a sha256 that changes with the commit of a Hub dataset and with the files that are read."""
    with quiet_datasets():
        builder = _builder(source)
    identity = repr((builder.hash, builder.config_id, builder.config.name, source))
    return hashlib.sha256(identity.encode()).hexdigest()


def _load(source: TextSource) -> Any:
    if _is_saved(source.path):
        return _saved(source)
    builder = _builder(source)
    try:
        splits = builder.as_streaming_dataset()
    except Exception as error:
        raise DataError(_why_none(source, error)) from error
    rows = _choose(splits, source)
    names = rows.column_names or ()
    # other columns may need more libraries, for images for example
    wanted = [name for name in (source.column, *BESIDE) if name in names]
    return rows.select_columns(wanted) if source.column in names else rows


def _is_saved(path: Path) -> bool:
    return path.is_dir() and any((path / name).exists() for name in SAVED_FILES)


def _saved(source: TextSource) -> Any:
    import datasets

    try:
        saved = datasets.load_from_disk(source.path)
    except Exception as error:
        raise DataError(_why_none(source, error)) from error
    if source.config is not None:
        raise DataError(Problem("text-without-setting", source.name, kind="a saved dataset", setting="config"))
    if not isinstance(saved, datasets.DatasetDict):
        if source.split not in (None, only := str(saved.split or "train")):
            raise DataError(which_split(source, [only]))
        return saved
    if source.split in saved:
        return saved[source.split]
    first = next(iter(saved))
    raise DataError(Problem("saved-splits", source.path, splits=list(saved), first=first))


def _choose(splits: Any, source: TextSource) -> Any:
    if source.split is None and len(splits) == 1:
        return next(iter(splits.values()))
    if source.split in splits:
        return splits[source.split]
    raise DataError(which_split(source, list(map(str, splits))))


def _builder(source: TextSource) -> Any:
    import datasets

    try:
        suffix = source.path.suffix.lower()
        if suffix in DATA_FILES and not source.is_folder:
            return datasets.load_dataset_builder(DATA_FILES[suffix], data_files=glob.escape(source.name))
        builder = datasets.load_dataset_builder(source.name, source.config, revision=source.revision)
    except Exception as error:
        raise DataError(_why_none(source, error)) from error
    kind = type(builder).__module__.rpartition(".")[2]
    if kind not in FORMATS:
        raise DataError(Problem("dataset-of-other-kind", source.name, kind=kind, formats=FORMATS))
    if kind == "text":
        # each file is one document, as if it were named alone
        builder.config.sample_by = "document"
    if kind == "csv" and builder.config.index_col is None:
        # if rows have more fields than the head, pandas would take the first column as row names
        builder.config.index_col = False
    return builder


def _why_none(source: TextSource, error: Exception) -> Problem:
    reason = library_error(error)
    if source.path.is_file():
        return Problem("table-unreadable", source.name, error=reason)
    return Problem("folder-no-dataset" if source.is_folder else "dataset-not-found", source.name, error=reason)


def _broken_off(source: TextSource, error: Exception) -> Problem:
    reason = library_error(error)
    if source.is_folder:
        return Problem("folder-rows-unreadable", source.name, error=reason)
    return Problem("hub-rows-unreadable" if source.is_on_hub else "file-rows-unreadable", source.name, error=reason)


def library_error(error: BaseException) -> str:
    """Return the message of a library's error in one line."""
    # if two files differ, pyarrow names every field of every row
    return textwrap.shorten(f"{error}", LONGEST, placeholder=" ...") or type(error).__name__
