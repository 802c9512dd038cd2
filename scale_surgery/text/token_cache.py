"""Tokens of texts on disk: the library `datasets` caches them as Arrow and maps them into memory.

    CACHE/tokens/default/0.0.0/KEY/    one sequence per row, with the columns "input_ids" and "labels"

A folder gets its name when it is complete. One process writes it while others wait.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa

from scale_surgery.errors import DataError, Problem
from scale_surgery.text.saved_datasets import library_error, quiet_datasets
from scale_surgery.text.sequences import Digest, Sequences, StoredSequences

FEATURES = datasets.Features({name: datasets.List(datasets.Value("int32")) for name in ("input_ids", "labels")})


class TokenBuilder(datasets.ArrowBasedBuilder):  # type: ignore[misc]
    """A writer of sequences and their summary: the number of scored tokens, the highest id, and the fingerprint."""

    def __init__(self, parts: Iterable[Sequences], made_of: Any, **options: Any) -> None:
        super().__init__(dataset_name="tokens", **options)
        self.parts, self.made_of = parts, made_of

    def _info(self) -> Any:
        return datasets.DatasetInfo(features=FEATURES)

    def _split_generators(self, dl_manager: Any) -> list[Any]:
        return [datasets.SplitGenerator("train")]

    def _generate_tables(self) -> Iterator[tuple[int, Any]]:
        digest, scored, highest = Digest(), 0, 0
        for number, part in enumerate(self.parts):
            starts = pa.array(part.starts, pa.int32())
            columns = [pa.ListArray.from_arrays(starts, pa.array(flat.numpy())) for flat in (part.ids, part.labels)]
            yield number, pa.table(columns, schema=FEATURES.arrow_schema)
            digest.add(part)
            scored += part.scored
            highest = max(highest, part.highest)
        known = {"scored": scored, "highest": highest, "fingerprint": digest.hexdigest()}
        self.info.description = json.dumps(known | {"made_of": self.made_of})


def store(key: str, cache: str | None, parts: Iterable[Sequences], made_of: Any) -> None:
    """Store sequences, unless they are already stored."""
    try:
        with quiet_datasets():
            TokenBuilder(parts, made_of, cache_dir=cache, hash=key).download_and_prepare()
    except (datasets.exceptions.DatasetGenerationError, OSError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, OSError):
            place, reason = cache or datasets.config.HF_DATASETS_CACHE, cause.strerror or library_error(cause)
            raise DataError(Problem("tokens-unwritten", place, error=reason)) from error
        raise cause from None


def find_stored(key: str, cache: str | None) -> Sequences | None:
    """Read stored sequences into memory; None if there are none."""
    try:
        with quiet_datasets():
            folder = Path(TokenBuilder((), None, cache_dir=cache, hash=key).cache_dir)
    except OSError:
        return None  # the cache has no folder yet, and it cannot be created
    if not folder.is_dir():
        return None
    stored = open_stored(key, cache)
    sequences = stored.some(len(stored))
    if sequences.fingerprint() != stored.digest:
        raise DataError(Problem("tokens-changed", folder))
    return sequences


def open_stored(key: str, cache: str | None) -> StoredSequences:
    """Map stored sequences into memory."""
    try:
        with quiet_datasets():
            builder = TokenBuilder((), None, cache_dir=cache, hash=key)
            rows = builder.as_dataset("train").with_format("torch")
    except FileNotFoundError as error:
        raise DataError(Problem("tokens-not-shared", cache or datasets.config.HF_DATASETS_CACHE)) from error
    except (OSError, pa.ArrowException) as error:
        raise DataError(Problem("tokens-damaged", builder.cache_dir, error=library_error(error))) from error
    known = json.loads(builder.info.description)
    return StoredSequences(rows, known["scored"], known["highest"], known["fingerprint"])
