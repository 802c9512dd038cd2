"""Rows of datasets, read by the library `datasets`: saved ones, data files, folders of them, and those of the Hub.

No code of a dataset runs, and formats that may hold pickles are not read.
"""

from __future__ import annotations

import glob
import hashlib
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scale_surgery.errors import DataError
from scale_surgery.text.sources import TextSource

# formats of data files that hold rows of text and plain values
FORMATS = ("json", "parquet", "csv", "text", "arrow")
# suffixes of data files, and the name of their format in the library
DATA_FILES = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".tsv": "csv"}
SEPARATORS = {".csv": ",", ".tsv": "\t"}
# suffixes of files with a row a line
LINE_FILES = {".jsonl", ".txt", *SEPARATORS}
# files by which a saved dataset is known, of one split or of several
SAVED_FILES = ("state.json", "dataset_dict.json")
# most characters of a library's error in ours
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


def read_rows(source: TextSource) -> Iterator[Any]:
    """Read the rows of a dataset, one after the other."""
    with quiet_datasets():
        rows = _load(source)
    try:
        yield from rows
    except Exception as error:  # of datasets, of pyarrow below it, and of the network
        raise DataError(
            f"{source.name}: cannot be read to its end ({library_error(error)}). {_advice(source)}"
        ) from error


def share_of_rows(source: TextSource, rows: int) -> float | None:
    """What share of a text its first rows are, about; None where only reading all of it would say."""
    from pyarrow.parquet import read_metadata

    try:
        with quiet_datasets():
            if _is_saved(source.path):
                return rows / len(_saved(source))
            files = _data_files(source)
        suffixes = {file.suffix.lower() for file in files}
        if suffixes == {".parquet"}:
            return rows / sum(int(read_metadata(file).num_rows) for file in files)
        if suffixes == {".arrow"}:
            return rows / sum(map(_arrow_rows, files))
        if suffixes <= LINE_FILES:
            return _bytes_of_rows(files, rows) / sum(file.stat().st_size for file in files)
        return None
    except DataError:
        raise
    except Exception as error:  # of pyarrow, about a file behind those rows
        raise DataError(
            f"{source.name}: cannot be read to its end ({library_error(error)}). {_advice(source)}"
        ) from error


def _data_files(source: TextSource) -> list[Path]:
    """The files that are read, of which a folder may hold others."""
    if not source.path.is_dir():
        return [source.path]
    splits = _builder(source).config.data_files
    return list(map(Path, splits[next(iter(splits)) if source.split is None else source.split]))


def _arrow_rows(file: Path) -> int:
    import pyarrow

    # no batch is read, but the headers of all
    with pyarrow.memory_map(str(file)) as content:
        try:
            return int(pyarrow.ipc.open_stream(content).read_all().num_rows)
        except pyarrow.ArrowInvalid:
            return int(pyarrow.ipc.open_file(content).read_all().num_rows)


def _bytes_of_rows(files: Sequence[Path], rows: int) -> int:
    """Bytes of the first rows of files with a row a line; a field of a table in quotes may hold lines too."""
    taken = quotes = 0
    for file in files:
        with file.open("rb") as lines:
            for line in lines:
                taken += len(line)
                quotes += line.count(b'"') * (file.suffix.lower() in SEPARATORS)
                rows -= quotes % 2 == 0
                if not rows:
                    return taken
    return taken


def digest_of(source: TextSource) -> str:
    """A sha256 that changes with the commit of a dataset on the Hub, and with the files that are read of it."""
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
    # other columns may hold what needs other libraries, such as images
    return rows.select_columns([source.column]) if source.column in (rows.column_names or ()) else rows


def _is_saved(path: Path) -> bool:
    return path.is_dir() and any((path / name).exists() for name in SAVED_FILES)


def _saved(source: TextSource) -> Any:
    import datasets

    try:
        saved = datasets.load_from_disk(source.path)
    except Exception as error:
        raise DataError(_why_none(source, error)) from error
    if not isinstance(saved, datasets.DatasetDict):
        return saved
    if source.split in saved:
        return saved[source.split]
    first = next(iter(saved))
    raise DataError(
        f"{source.name}: holds the splits {', '.join(saved)}. Give the folder of one, {source.path}/{first}."
    )


def _choose(splits: Any, source: TextSource) -> Any:
    if source.split is None and len(splits) == 1:
        return next(iter(splits.values()))
    if source.split in splits:
        return splits[source.split]
    reason = f"has no split {source.split}, it holds" if source.split else "holds the splits"
    raise DataError(
        f"{source.name}: {reason} {', '.join(map(str, splits))}. Say which is meant: {source.name},split="
        f"{next(iter(splits))}."
    )


def _builder(source: TextSource) -> Any:
    import datasets

    try:
        suffix = source.path.suffix.lower()
        if suffix in DATA_FILES and not source.path.is_dir():
            options = _as_texts(source.path, SEPARATORS[suffix]) if suffix in SEPARATORS else {}
            return datasets.load_dataset_builder(DATA_FILES[suffix], data_files=glob.escape(source.name), **options)
        builder = datasets.load_dataset_builder(source.name, source.config, revision=source.revision)
    except Exception as error:
        raise DataError(_why_none(source, error)) from error
    kind = type(builder).__module__.rpartition(".")[2]
    if kind not in FORMATS:
        raise DataError(
            f"{source.name}: holds data of the kind {kind}, expected rows of text in one of: {', '.join(FORMATS)}."
        )
    return builder


def _as_texts(table: Path, separator: str) -> dict[str, Any]:
    """Options of the library by which each field of a table is the text that stands there, and an empty one is none."""
    import datasets
    import pandas

    # pandas would guess numbers, true and false from the fields, and take words such as None for missing ones
    names = pandas.read_csv(table, sep=separator, nrows=0).columns
    features = datasets.Features({name: datasets.Value("string") for name in names})
    return {"sep": separator, "features": features, "keep_default_na": False, "na_values": [""]}


def _why_none(source: TextSource, error: Exception) -> str:
    reason = library_error(error)
    if source.path.is_file():
        return f"{source.name}: cannot be read as a table ({reason}). Give UTF-8 text, JSONL or a saved dataset."
    if source.path.is_dir():
        return (
            f"{source.name}: is no saved dataset ({reason}). Give a folder that save_to_disk wrote, or one with "
            "JSONL or Parquet files."
        )
    return (
        f"{source.name}: there is no such file or folder, and no such dataset could be opened on the Hub ({reason}). "
        f"Check the name; where a dataset has several configurations, give {source.name},config=NAME."
    )


def _advice(source: TextSource) -> str:
    if source.path.is_dir():
        return "Give a folder whose files are all rows of text with the same columns, or the files one by one."
    return "Try again." if source.is_on_hub else "Write its rows as JSONL."


def library_error(error: BaseException) -> str:
    """The message of a library's error, in one line."""
    # pyarrow names every field of every row where two files differ
    return textwrap.shorten(f"{error}", LONGEST, placeholder=" ...") or type(error).__name__
