"""Token sequences on disk, made once and mapped into memory afterwards, so that a corpus may be larger than memory.

    CACHE/KEY/                 KEY: sha256 of the texts' bytes, of the tokenizer, and of how sequences are cut
      ids.bin labels.bin       int32, little-endian: tokens of all sequences, one after the other
      starts.bin               int64: where each sequence begins, and where the last one ends
      tokens.json              how many there are, and what they were made of
    CACHE/KEY.partial/         the same while it is made; whoever makes it holds a lock on it, others wait

A folder has its own name from the moment it is whole, on disk. What a kill left under the other name is made anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from scale_surgery.checkpoint.files import sync, write_json
from scale_surgery.checkpoint.folder import read_chunks, read_json
from scale_surgery.checkpoint.staging import sync_folder
from scale_surgery.errors import CheckpointError, DataError
from scale_surgery.running.sequences import NO_TEXT, NOTHING_SCORED, Sequences

ABOUT_FILE = "tokens.json"
IDS_FILE, LABELS_FILE, STARTS_FILE = "ids.bin", "labels.bin", "starts.bin"
STARTS_AT_ONCE = 2**16


@dataclass(frozen=True)
class Facts:
    """What is known of stored sequences without reading them.

    Attributes:
        tokens: How many there are.
        sequences: How many sequences they are.
        scored: How many of the tokens are scored.
        fingerprint: What `Sequences.fingerprint` says of them.
    """

    tokens: int = 0
    sequences: int = 0
    scored: int = 0
    fingerprint: str = ""


@dataclass(frozen=True)
class StoredSequences(Sequences):
    """Sequences in files that are mapped into memory; what would take reading all of them is known.

    Attributes:
        facts: What is known.
    """

    facts: Facts

    @property
    def scored(self) -> int:
        """Tokens that are scored."""
        return self.facts.scored

    def fingerprint(self) -> str:
        """sha256 of the tokens, the labels and where sequences begin."""
        return self.facts.fingerprint


def default_cache() -> Path:
    """Where tokens are kept when nothing is said: beside what other libraries keep in the cache of Hugging Face.

    Raises:
        DataError: If there can be no such folder.
    """
    from huggingface_hub import cached_assets_path

    try:
        return cached_assets_path("scale-surgery", "texts", "tokens")
    except (OSError, ValueError) as error:
        raise DataError(
            f"the cache of Hugging Face cannot hold tokens ({' '.join(str(error).split())}). Set HF_HOME, or name "
            "another folder with --cache-dir."
        ) from error


def key_of(made_of: Mapping[str, Any]) -> str:
    """The name of a cached corpus: a hash of everything that decides its tokens."""
    return hashlib.sha256(repr(sorted(made_of.items())).encode()).hexdigest()[:40]


def is_stored(folder: Path) -> bool:
    """Whether a folder holds sequences, as many as it says."""
    try:
        facts = Facts(**read_json(folder / ABOUT_FILE)["facts"])
        sizes = {name: (folder / name).stat().st_size for name in (IDS_FILE, LABELS_FILE, STARTS_FILE)}
    except (OSError, CheckpointError, KeyError, TypeError):
        return False
    tokens, starts = 4 * facts.tokens, 8 * (facts.sequences + 1)
    return sizes == {IDS_FILE: tokens, LABELS_FILE: tokens, STARTS_FILE: starts}


def open_stored(folder: Path) -> StoredSequences:
    """Map stored sequences into memory.

    Args:
        folder: Where they are.

    Returns:
        The sequences.

    Raises:
        DataError: If they are not there, such as on a disk that this process does not see.
    """
    if not is_stored(folder):
        raise DataError(
            f"{folder}: holds no tokens, though another process has put them there. Give --cache-dir, a folder on a "
            "disk that all processes see."
        )
    facts = Facts(**read_json(folder / ABOUT_FILE)["facts"])
    ids, labels = (_mapped(folder / name, facts.tokens, torch.int32) for name in (IDS_FILE, LABELS_FILE))
    return StoredSequences(ids, labels, _mapped_starts(folder / STARTS_FILE), facts)


def _mapped(file: Path, count: int, dtype: torch.dtype) -> Tensor:
    # not shared: what is written into memory would never reach the file
    return torch.from_file(str(file), shared=False, size=count, dtype=dtype)


def _mapped_starts(file: Path) -> memoryview:
    """Integers of Python, one at a time: a tuple of them all would take five times as much."""
    with file.open("rb") as stream:
        return memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)).cast("q")


def store(folder: Path, parts: Iterable[Sequences], made_of: Mapping[str, Any]) -> None:
    """Store sequences, unless they are there; one process does so, others that want the same wait for it.

    Args:
        folder: Where they shall be.
        parts: The sequences, in parts; read only if they are not there.
        made_of: What they are made of, to be told to who looks.

    Raises:
        DataError: If there is no sequence, or they cannot be written; nothing is left then.
    """
    if sys.byteorder != "little":
        raise DataError("Tokens are cached on little-endian machines only. Give less text, which needs no cache.")
    try:
        if is_stored(folder):
            return
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder) as partial:
            if not is_stored(folder):
                _make(partial, parts, made_of)
                shutil.rmtree(folder, ignore_errors=True)  # damaged: files are missing or cut off
                partial.rename(folder)
                sync(folder.parent)
    except OSError as error:
        raise DataError(
            f"{folder.parent}: the tokens of the texts cannot be kept there, {error.strerror or error}. They take "
            "eight bytes each. Free some space, or name another folder with --cache-dir."
        ) from error


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[Path]:
    """Wait until no other process makes a folder, and give an empty one to make it in; it does not stay."""
    import fcntl  # not on Windows

    partial = folder.with_name(f"{folder.name}.partial")
    while True:
        partial.mkdir(exist_ok=True)
        handle = os.open(partial, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
        # whoever had it may have renamed it meanwhile, or removed it
        if partial.exists() and partial.stat().st_ino == os.fstat(handle).st_ino:
            break
        os.close(handle)
    try:
        for left in list(partial.iterdir()):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # nothing is there by now, if all went well
        os.close(handle)


def _make(partial: Path, parts: Iterable[Sequences], made_of: Mapping[str, Any]) -> None:
    facts, digest, is_empty = Facts(), hashlib.sha256(), True
    with (
        (partial / IDS_FILE).open("wb") as ids,
        (partial / LABELS_FILE).open("wb") as labels,
        (partial / STARTS_FILE).open("wb") as starts,
    ):
        for part in parts:
            is_empty = False
            digest.update(part.ids.numpy().tobytes())
            facts = _append(part, facts, ids, labels, starts)
        _write(starts, torch.tensor([facts.tokens], dtype=torch.int64))
    if not facts.sequences:
        raise DataError(NO_TEXT if is_empty else NOTHING_SCORED)
    for chunk in read_chunks(partial / LABELS_FILE):
        digest.update(chunk)
    for text in _told(_mapped_starts(partial / STARTS_FILE)):
        digest.update(text.encode())
    whole = replace(facts, fingerprint=digest.hexdigest())
    write_json(partial / ABOUT_FILE, {"facts": asdict(whole), "made_of": dict(made_of)})
    sync_folder(partial)


def _append(part: Sequences, facts: Facts, ids: IO[bytes], labels: IO[bytes], starts: IO[bytes]) -> Facts:
    _write(ids, part.ids)
    _write(labels, part.labels)
    _write(starts, torch.tensor(part.starts[:-1], dtype=torch.int64) + facts.tokens)
    return replace(
        facts,
        tokens=facts.tokens + len(part.ids),
        sequences=facts.sequences + len(part),
        scored=facts.scored + part.scored,
    )


def _write(file: IO[bytes], tokens: Tensor) -> None:
    file.write(tokens.numpy().tobytes())


def _told(starts: Sequence[int]) -> Iterator[str]:
    """What `repr` says of a tuple of all starts, in pieces."""
    for first in range(0, len(starts), STARTS_AT_ONCE):
        some = ", ".join(map(str, starts[first : first + STARTS_AT_ONCE]))
        yield f"{', ' if first else '('}{some}"
    yield ")"
