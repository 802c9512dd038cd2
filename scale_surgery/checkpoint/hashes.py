"""sha256 of files and of tensors, in threads."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scale_surgery.checkpoint.folder import Checkpoint, read_chunks
from scale_surgery.checkpoint.headers import TensorInfo
from scale_surgery.progress import Progress, no_progress

HASH_THREADS = 2


def hash_file(file: Path, advance: Progress = no_progress) -> str:
    """sha256 of a file; `advance` is called with the bytes done."""
    digest = hashlib.sha256()
    for chunk in read_chunks(file):
        digest.update(chunk)
        advance(len(chunk))
    return digest.hexdigest()


def hash_tensor(path: Path, info: TensorInfo, advance: Progress = no_progress) -> str:
    """sha256 of a tensor's bytes on disk."""
    digest = hashlib.sha256()
    for chunk in read_chunks(path / info.file, info.offset, info.bytes):
        digest.update(chunk)
        advance(len(chunk))
    return digest.hexdigest()


def hash_files(path: Path, names: list[str], advance: Progress = no_progress) -> dict[str, str]:
    """sha256 of several files of a folder, by name."""
    return _in_threads(lambda name: hash_file(path / name, advance), names)


def hash_tensors(checkpoint: Checkpoint, names: list[str], advance: Progress = no_progress) -> dict[str, str]:
    """sha256 of the bytes of several tensors, by name."""
    return _in_threads(lambda name: hash_tensor(checkpoint.path, checkpoint.tensors[name], advance), names)


def _in_threads(work: Callable[[str], str], names: list[str]) -> dict[str, str]:
    # hashing releases the interpreter lock, so threads use the cores
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        return dict(zip(names, pool.map(work, names), strict=True))
