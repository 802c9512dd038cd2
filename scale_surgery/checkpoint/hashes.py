"""sha256 of files and of tensors, in threads."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from operator import attrgetter
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


def hash_all(
    checkpoint: Checkpoint, names: list[str], advance: Progress = no_progress
) -> tuple[dict[str, str], dict[str, str]]:
    """sha256 of files of a checkpoint and of every tensor in them; each byte is read once.

    Args:
        checkpoint: The checkpoint; as its headers say, the tensors of a file lie one after the other and fill it.
        names: The files.
        advance: Called with the bytes done.

    Returns:
        The sums of the files and of the tensors, by name.
    """
    files: dict[str, str] = {}
    tensors: dict[str, str] = {}
    held: dict[str, list[TensorInfo]] = {name: [] for name in names}
    for info in checkpoint.tensors.values():
        held.get(info.file, []).append(info)
    with ThreadPoolExecutor(1) as beside:
        for name, own in held.items():
            files[name], sums = _hash_with_tensors(checkpoint.path / name, own, beside, advance)
            tensors |= sums
    return files, tensors


def _hash_with_tensors(
    file: Path, held: list[TensorInfo], beside: Executor, advance: Progress
) -> tuple[str, dict[str, str]]:
    whole, held = hashlib.sha256(), sorted(held, key=attrgetter("offset"))

    def hash_part(start: int, length: int | None) -> str:
        part = hashlib.sha256()
        for chunk in read_chunks(file, start, length):
            added = beside.submit(whole.update, chunk)
            part.update(chunk)
            added.result()
            advance(len(chunk))
        return part.hexdigest()

    hash_part(0, held[0].offset if held else None)
    tensors = {info.name: hash_part(info.offset, info.bytes) for info in held}
    return whole.hexdigest(), tensors


def _in_threads(work: Callable[[str], str], names: list[str]) -> dict[str, str]:
    # hashing releases the interpreter lock, so threads use the cores
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        return dict(zip(names, pool.map(work, names), strict=True))
