"""SHA-256 hashes of files and tensors, in threads."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from threading import Thread

from scale_surgery.checkpoint.folder import Checkpoint, read_chunks
from scale_surgery.checkpoint.headers import TensorInfo
from scale_surgery.progress import Progress, no_progress

HASH_THREADS = 2


def hash_file(file: Path, advance: Progress = no_progress) -> str:
    """Return the SHA-256 of a file. `advance` is called with the number of bytes done."""
    digest = hashlib.sha256()
    for chunk in read_chunks(file):
        digest.update(chunk)
        advance(len(chunk))
    return digest.hexdigest()


def hash_tensor(path: Path, info: TensorInfo, advance: Progress = no_progress) -> str:
    """Return the SHA-256 of a tensor's bytes on disk."""
    digest = hashlib.sha256()
    for chunk in read_chunks(path / info.file, info.offset, info.bytes):
        digest.update(chunk)
        advance(len(chunk))
    return digest.hexdigest()


def hash_files(path: Path, names: list[str], advance: Progress = no_progress) -> dict[str, str]:
    """Return the SHA-256 of several files of a folder, by name."""
    return _in_threads(lambda name: hash_file(path / name, advance), names)


def changed_tensors(checkpoint: Checkpoint, names: list[str], before: Mapping[str, str]) -> dict[str, str]:
    """Return the SHA-256 of the tensors with a hash that differs from `before`, by name."""
    hashes = hash_tensors(checkpoint, names)
    return {name: digest for name, digest in hashes.items() if digest != before.get(name)}


def hash_tensors(checkpoint: Checkpoint, names: list[str], advance: Progress = no_progress) -> dict[str, str]:
    """Return the SHA-256 of the bytes of several tensors, by name."""
    return _in_threads(lambda name: hash_tensor(checkpoint.path, checkpoint.tensors[name], advance), names)


@dataclass(frozen=True)
class Sums:
    """The SHA-256 hashes of files and of the tensors in them, by name."""

    files: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)


def hash_all(checkpoint: Checkpoint, names: list[str], advance: Progress = no_progress) -> Sums:
    """Return the SHA-256 of files of a checkpoint and of every tensor in them. Each byte is read once."""
    sums = Sums()
    tensors: dict[str, list[TensorInfo]] = {}
    for info in sorted(checkpoint.tensors.values(), key=attrgetter("offset", "bytes")):
        tensors.setdefault(info.file, []).append(info)
    for name in names:
        sums.files[name], digests = _hash_with_tensors(checkpoint.path / name, tensors.get(name, []), advance)
        sums.tensors.update(digests)
    return sums


def _hash_with_tensors(file: Path, tensors: Sequence[TensorInfo], advance: Progress) -> tuple[str, dict[str, str]]:
    """Return the SHA-256 of a file and of its tensors, which are sorted by offset, empty ones first."""
    whole, parts = hashlib.sha256(), [hashlib.sha256() for _ in tensors]
    start = place = 0
    for chunk in read_chunks(file):
        # hashing releases the interpreter lock, so both hashes run at once
        beside = Thread(target=whole.update, args=(chunk,))
        beside.start()
        end, view = start + len(chunk), memoryview(chunk)
        while place < len(tensors) and (info := tensors[place]).offset < end:
            parts[place].update(view[max(0, info.offset - start) : info.offset + info.bytes - start])
            if info.offset + info.bytes > end:
                break
            place += 1
        start = end
        beside.join()
        advance(len(chunk))
    return whole.hexdigest(), {info.name: part.hexdigest() for info, part in zip(tensors, parts, strict=True)}


def _in_threads(work: Callable[[str], str], names: list[str]) -> dict[str, str]:
    # hashing releases the interpreter lock, so threads use the cores
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        return dict(zip(names, pool.map(work, names), strict=True))
