"""sha256 of files and of tensors, in threads."""

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


def changed_tensors(checkpoint: Checkpoint, names: list[str], before: Mapping[str, str]) -> dict[str, str]:
    """sha256 of those of several tensors whose bytes are not what they were, by name."""
    hashes = hash_tensors(checkpoint, names)
    return {name: digest for name, digest in hashes.items() if digest != before.get(name)}


def hash_tensors(checkpoint: Checkpoint, names: list[str], advance: Progress = no_progress) -> dict[str, str]:
    """sha256 of the bytes of several tensors, by name."""
    return _in_threads(lambda name: hash_tensor(checkpoint.path, checkpoint.tensors[name], advance), names)


@dataclass(frozen=True)
class Sums:
    """sha256 of files and of the tensors in them, by name."""

    files: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)


class FileHash:
    """sha256 of a file and of each tensor in it, from its bytes, which come by once and in order."""

    def __init__(self, held: Sequence[TensorInfo]) -> None:
        """Begin.

        Args:
            held: Its tensors, in the order of their places.
        """
        self._held, self._done, self._seen = held, 0, 0
        self._whole, self._parts = hashlib.sha256(), [hashlib.sha256() for _ in held]

    def update(self, chunk: bytes | memoryview) -> None:
        """Take the bytes that follow."""
        # hashing releases the interpreter lock, so the two use two cores
        beside = Thread(target=self._whole.update, args=(chunk,))
        beside.start()
        start, end, view = self._seen, self._seen + len(chunk), memoryview(chunk)
        while self._done < len(self._held) and (info := self._held[self._done]).offset < end:
            self._parts[self._done].update(view[max(0, info.offset - start) : info.offset + info.bytes - start])
            if info.offset + info.bytes > end:
                break
            self._done += 1
        self._seen = end
        beside.join()

    def add_to(self, sums: Sums, name: str) -> None:
        """Put what was found where sums of files are collected."""
        sums.files[name] = self._whole.hexdigest()
        sums.tensors.update({info.name: part.hexdigest() for info, part in zip(self._held, self._parts, strict=True)})


def tensors_by_file(checkpoint: Checkpoint) -> dict[str, list[TensorInfo]]:
    """The tensors of each shard, in the order of their places."""
    held: dict[str, list[TensorInfo]] = {shard: [] for shard in checkpoint.shards}
    for info in sorted(checkpoint.tensors.values(), key=attrgetter("offset")):
        held[info.file].append(info)
    return held


def hash_all(checkpoint: Checkpoint, names: list[str], advance: Progress = no_progress) -> Sums:
    """sha256 of files of a checkpoint and of every tensor in them; each byte is read once.

    Args:
        checkpoint: The checkpoint.
        names: The files.
        advance: Called with the bytes done.

    Returns:
        The sums of the files, and of the tensors in them.
    """
    sums, held = Sums(), tensors_by_file(checkpoint)
    for name in names:
        found = FileHash(held.get(name, []))
        for chunk in read_chunks(checkpoint.path / name):
            found.update(chunk)
            advance(len(chunk))
        found.add_to(sums, name)
    return sums


def _in_threads(work: Callable[[str], str], names: list[str]) -> dict[str, str]:
    # hashing releases the interpreter lock, so threads use the cores
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        return dict(zip(names, pool.map(work, names), strict=True))
