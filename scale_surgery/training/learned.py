"""Texts to learn from and to measure with, as token sequences: small ones in memory, large ones in a cache on disk.

Both hold the same sequences in the same order, and say the same of themselves, so that a run that was begun with one is
resumed with the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.checkpoint.hashes import hash_file
from scale_surgery.checkpoint.reading import open_regular
from scale_surgery.checkpoint.stamps import Stamps, check_unchanged, take_stamps
from scale_surgery.errors import MOST_LINES, CheckpointError, DataError
from scale_surgery.progress import Progress, Track, no_progress
from scale_surgery.running.context import choose_length, context_of
from scale_surgery.running.documents import LongText, read_documents, stream_documents
from scale_surgery.running.options import RunOptions
from scale_surgery.running.saved_datasets import digest_of
from scale_surgery.running.sequences import NOTHING_SCORED, Sequences, join
from scale_surgery.running.sources import TextSource, parse_source
from scale_surgery.running.text_files import readable
from scale_surgery.running.texts import (
    TOO_LONG,
    in_groups,
    pack,
    scored_ones,
    stride,
    tokenize,
    tokenize_group,
    too_long,
)
from scale_surgery.running.token_cache import default_cache, is_stored, key_of, open_stored, store
from scale_surgery.running.tokenizer import digest_tokenizer, need_tokenizer
from scale_surgery.training.settings import REHEARSAL, TrainingSettings

# bytes of files from which on tokens are kept on disk; below, making them anew takes seconds
LARGE = 64 * 2**20
# the form of what is kept, and how texts become tokens: another number finds nothing that is there
CACHE_FORM = 1


@dataclass(frozen=True)
class Reader:
    """How texts become sequences to learn.

    Attributes:
        tokenizer: The model's tokenizer.
        tokenizer_digest: What tells it from others.
        length: Tokens of a sequence.
        packing: Whether documents are joined and cut; otherwise each is a sequence.
        learn_prompts: Whether prompts are scored.
    """

    tokenizer: Any
    tokenizer_digest: str
    length: int
    packing: bool
    learn_prompts: bool

    def read(self, paths: Sequence[str], advance: Progress = no_progress) -> Iterator[Sequences]:
        """Sequences in which something is learned, some after the other.

        Args:
            paths: Files, folders and ids of texts.
            advance: Called with the bytes of files that were read.

        Yields:
            The sequences.

        Raises:
            DataError: If texts cannot be read, or a document does not fit and is not to be cut.
        """
        read = self._packed if self.packing else self._padded
        return map(scored_ones, read(paths, advance))

    def _packed(self, paths: Sequence[str], advance: Progress) -> Iterator[Sequences]:
        rest: Sequences | None = None
        for group in in_groups(stream_documents(paths, advance)):
            for part in tokenize_group(group, self.tokenizer, learn_prompts=self.learn_prompts):
                joined = part if rest is None else _joined(rest, part)
                whole = len(joined.ids) // self.length * self.length
                if whole:
                    yield pack(_cut(joined, 0, whole), self.length)
                rest = _cut(joined, whole, len(joined.ids))
        if rest is not None and len(rest.ids):
            yield pack(rest, self.length)

    def _padded(self, paths: Sequence[str], advance: Progress) -> Iterator[Sequences]:
        problems: list[str] = []
        more = 0
        for group in in_groups(stream_documents(paths, advance)):
            part = join(tokenize_group(group, self.tokenizer, learn_prompts=self.learn_prompts))
            if isinstance(group, LongText):
                part = Sequences(part.ids, part.labels, (0, len(part.ids)))
            problems += too_long(part, [group] if isinstance(group, LongText) else group, self.length)
            more += len(problems[MOST_LINES:])  # there may be as many as documents
            del problems[MOST_LINES:]
            yield part
        if problems:
            raise DataError.from_problems([*problems, *([f"... and {more} more."] if more else []), TOO_LONG])

    @property
    def told(self) -> dict[str, Any]:
        """What decides which sequences a text becomes."""
        packing = self.length if self.packing else f"padding, at most {self.length}"
        return {
            "form": CACHE_FORM,
            "tokenizer": self.tokenizer_digest,
            "packing": packing,
            "learn_prompts": self.learn_prompts,
        }


def read_texts(
    checkpoint: Checkpoint,
    files: Mapping[str, Sequence[str | Path]],
    settings: TrainingSettings,
    run: RunOptions,
    *,
    cache: Path | None,
    processes: Any,
    track: Track,
) -> dict[str, Sequences]:
    """Token sequences to learn from ("learn"), and those to measure on ("old", "new") where files are given.

    Args:
        checkpoint: The model that is trained.
        files: Texts by side.
        settings: What the user set.
        run: How the tokenizer is loaded: trust_remote_code.
        cache: Folder in which the tokens of what is learned are kept; None keeps those of large texts alone.
        processes: The processes that share the run; one makes what is kept.
        track: Makes progress bars.

    Raises:
        DataError: If the texts cannot be read, are empty or do not fit the model.
    """
    name = checkpoint.path.name
    length = choose_length(settings.sequence_length, {name: context_of(checkpoint.config)})
    tokenizer = need_tokenizer(checkpoint.path, name, run)
    digest = digest_tokenizer(tokenizer, checkpoint.path)
    reader = Reader(tokenizer, digest, length, settings.packing, settings.learn_prompts)
    learned = [str(text) for text in files["learn"]]
    if cache is None and not _is_large(learned):
        texts = {"learn": _in_memory(reader.read(learned))}
    else:
        texts = {"learn": _stored(reader, learned, cache or default_cache(), processes, track)}
    if files.get(REHEARSAL):
        texts[REHEARSAL] = _in_memory(reader.read(list(map(str, files[REHEARSAL]))))
    for side, given in files.items():
        if side not in ("learn", REHEARSAL) and given:
            texts[side] = stride(tokenize(read_documents(given), tokenizer), length, max(1, length // 2))
    return texts


def _in_memory(parts: Iterator[Sequences]) -> Sequences:
    found = list(parts)
    if found and not any(map(len, found)):
        raise DataError(NOTHING_SCORED)
    return join(found)


def _stored(reader: Reader, paths: Sequence[str], cache: Path, processes: Any, track: Track) -> Sequences:
    """Sequences in the cache, made by one process; all learn where they are, or why there are none."""
    return open_stored(Path(made_by_one(processes, lambda: str(_make(reader, paths, cache, track)))))


def made_by_one(processes: Any, make: Callable[[], Any]) -> Any:
    """Let one process make something of texts; all get it, or learn what was wrong.

    Args:
        processes: The processes that share the run.
        make: Makes it.

    Raises:
        DataError: If the texts cannot be used, in every process.
    """
    from accelerate.utils import broadcast_object_list

    found: list[Any] = [None, ()]
    if processes.is_main_process:
        try:
            found[0] = make()
        except DataError as error:
            found[1] = error.lines
    if processes.num_processes > 1:
        broadcast_object_list(found)
    if found[1]:
        raise DataError.from_problems(found[1])
    return found[0]


def _make(reader: Reader, paths: Sequence[str], cache: Path, track: Track) -> Path:
    sources = [parse_source(path) for path in paths]
    total = sum(map(_bytes_of, sources))
    stamps = take_stamps(file for source in sources for file in _files_of(source))
    with track("texts", total) as advance:
        told = [_digest(source, advance) for source in sources]
    folder = cache / key_of({**reader.told, "texts": told})
    if not is_stored(folder):
        with track("tokens", total) as advance:
            parts = _unless_changed(reader.read(paths, advance), stamps)
            store(folder, parts, {**reader.told, "texts": list(paths)})
    return folder


def _unless_changed(parts: Iterator[Sequences], stamps: Stamps) -> Iterator[Sequences]:
    """Sequences of files that at their end still are those whose bytes gave the cache its name."""
    yield from parts
    try:
        check_unchanged(stamps)
    except CheckpointError as error:
        raise DataError.from_problems(error.lines) from error


def _is_large(paths: Sequence[str]) -> bool:
    sources = [parse_source(path) for path in paths]
    return any(source.is_on_hub for source in sources) or sum(map(_bytes_of, sources)) >= LARGE


def _files_of(source: TextSource) -> list[Path]:
    if source.path.is_dir():
        return sorted(file for file in source.path.rglob("*") if file.is_file())
    return [source.path] if source.path.is_file() else []


def _bytes_of(source: TextSource) -> int:
    return sum(file.stat().st_size for file in _files_of(source))


def _digest(source: TextSource, advance: Progress) -> str:
    """What tells a text from another: how it is read, and its bytes."""
    settings = [source.column, source.split, source.config]
    if source.is_on_hub:
        return f"dataset {settings} {digest_of(source)}"
    if source.path.is_dir():
        files = [(str(file.relative_to(source.path)), hash_file(file, advance)) for file in _files_of(source)]
        return f"folder {settings} {files}"
    kind = source.path.suffix if source.path.suffix in (".jsonl", ".json") else "text"
    with readable(source.path), open_regular(source.path):
        return f"{kind} {settings} {hash_file(source.path, advance)}"


def _joined(one: Sequences, other: Sequences) -> Sequences:
    return Sequences(torch.cat((one.ids, other.ids)), torch.cat((one.labels, other.labels)), ())


def _cut(sequences: Sequences, start: int, end: int) -> Sequences:
    return Sequences(sequences.ids[start:end], sequences.labels[start:end], ())
