"""Texts to learn from and to measure with, as token sequences: small ones in memory, large ones in a cache on disk.

Both hold the same sequences in the same order, with the same fingerprint, so a run can start with one and resume with
the other.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.expansions import BASE_NAME
from scale_surgery.checkpoint.file_stat import Stamps, check_unchanged, take_stamps
from scale_surgery.checkpoint.hashes import hash_file
from scale_surgery.checkpoint.reading import open_regular
from scale_surgery.errors import CheckpointError, DataError, Problem
from scale_surgery.folder.folder import Folder
from scale_surgery.folder.parts import base_tokenizer, tokenizer_alone
from scale_surgery.progress import Progress, Track, no_progress
from scale_surgery.running.context import choose_length, context_of
from scale_surgery.running.options import RunOptions
from scale_surgery.running.tokenizer import check_token_ids, digest_tokenizer
from scale_surgery.text.documents import Document, read_documents
from scale_surgery.text.saved_datasets import DATA_FILES, digest_of
from scale_surgery.text.sequences import (
    NO_TEXT,
    NOTHING_SCORED,
    Sequences,
    StoredSequences,
    concatenate,
    from_arrays,
)
from scale_surgery.text.sources import TextSource, parse_source
from scale_surgery.text.text_files import ARRAY, LINES, TABLES, readable, suffix_of
from scale_surgery.text.tokenizing import pack, read_tokens, scored_ones, start_tokens, stride, token_before, tokenize
from scale_surgery.training.settings import REHEARSAL, TrainingSettings

# texts of at least this many bytes are cached; smaller ones are tokenized in seconds
LARGE = 64 * 2**20
# version of the cache's format and of the tokenization
CACHE_FORM = 7
# tokens that are written at once
TOKENS_AT_ONCE = 2**17


@dataclass(frozen=True)
class Reader:
    """A reader that turns texts into sequences to learn.

    Attributes:
        tokenizer: The model's tokenizer.
        tokenizer_digest: See `digest_tokenizer`.
        length: Tokens of a sequence.
        packing: True if documents are joined and cut; otherwise each is a sequence.
        learn_prompts: True if prompts are scored.
    """

    tokenizer: Any
    tokenizer_digest: str
    length: int
    packing: bool
    learn_prompts: bool

    def read(self, paths: Sequence[str], advance: Progress = no_progress) -> Iterator[Sequences]:
        """Generate the sequences with something to learn, in parts."""
        documents = read_documents(paths, advance, whole=False)
        tokens = read_tokens(documents, self.tokenizer, learn_prompts=self.learn_prompts)
        is_empty = is_unscored = True
        for part in map(scored_ones, self._packed(tokens) if self.packing else self._padded(tokens)):
            is_empty = False
            if len(part):
                is_unscored = False
                yield part
        if is_unscored:
            raise DataError(NO_TEXT if is_empty else NOTHING_SCORED)

    def _packed(self, tokens: Iterator[tuple[Document, list[int], list[int]]]) -> Iterator[Sequences]:
        ids, labels, start = array("i"), array("i"), start_tokens(self.tokenizer)
        for _, some, scored in tokens:
            ids.extend(some)
            labels.extend(scored)
            if len(ids) >= max(TOKENS_AT_ONCE, self.length):
                whole = len(ids) // self.length * self.length
                yield pack(from_arrays(ids[:whole], labels[:whole], ()), self.length, start)
                ids, labels = ids[whole:], labels[whole:]
        if ids:
            yield pack(from_arrays(ids, labels, ()), self.length, start)

    def _padded(self, tokens: Iterator[tuple[Document, list[int], list[int]]]) -> Iterator[Sequences]:
        problems: list[Problem] = []
        ids, labels, starts = array("i"), array("i"), [0]
        for document, some, scored in tokens:
            ids.extend(some)
            labels.extend(scored)
            if document.goes_on:
                continue
            if (size := len(ids) - starts[-1]) > self.length:
                problems.append(Problem("document-too-long", document.source, tokens=size, length=self.length))
            starts.append(len(ids))
            if len(ids) >= TOKENS_AT_ONCE:
                yield from_arrays(ids, labels, starts)
                ids, labels, starts = array("i"), array("i"), [0]
        if ids:
            yield from_arrays(ids, labels, starts)
        if problems:
            raise DataError(*problems)

    @property
    def made_of(self) -> dict[str, Any]:
        """The settings that decide the sequences of a text."""
        packing = self.length if self.packing else f"padding, at most {self.length}"
        return {
            "form": CACHE_FORM,
            "tokenizer": self.tokenizer_digest,
            "packing": packing,
            "learn_prompts": self.learn_prompts,
        }


def read_texts(
    folder: Folder,
    files: Mapping[str, Sequence[str | Path]],
    settings: TrainingSettings,
    run: RunOptions,
    *,
    cache: Path | None,
    processes: Any,
    track: Track,
) -> dict[str, Any]:
    """Read the token sequences to learn from ("learn"), and to measure on ("old", "new") if files are given."""
    name = folder.path.name
    length = choose_length(settings.sequence_length, {name: context_of(folder.config)})
    tokenizer = tokenizer_alone(folder, run)
    of_base = base_tokenizer(folder, tokenizer, run)
    digest = digest_tokenizer(tokenizer, folder.path)
    reader = Reader(tokenizer, digest, length, settings.packing, settings.learn_prompts)
    learned = [str(text) for text in files["learn"]]
    if cache is None and not _is_large(learned):
        texts: dict[str, Sequences | StoredSequences] = {"learn": concatenate(reader.read(learned))}
    else:
        texts = {"learn": _stored(reader, learned, cache, processes, track)}
    if files.get(REHEARSAL):
        # as the base's tokenizer reads it: the base has no answer to new tokens, and their rows change as they learn
        of_rehearsal = replace(reader, tokenizer=of_base)
        texts[REHEARSAL] = concatenate(of_rehearsal.read(list(map(str, files[REHEARSAL]))))
    for side, given in files.items():
        if side not in ("learn", REHEARSAL) and given:
            windows = length, max(1, length // 2), start_tokens(tokenizer)
            before = token_before(tokenizer, of_base)
            texts[side] = stride(tokenize(read_documents(given), tokenizer, before=before), *windows)
            # if tokens were added, also as the base's tokenizer reads them ("base old", "base new")
            if of_base is not tokenizer:
                read = tokenize(read_documents(given), of_base, before=before)
                texts[f"{BASE_NAME} {side}"] = stride(read, *windows)
    for side, sequences in texts.items():
        called = "training" if side == "learn" else side
        check_token_ids(name, sequences.highest, folder.manifest.plan.vocabulary, f"the {called} text")
    return texts


def _stored(reader: Reader, paths: Sequence[str], cache: Path | None, processes: Any, track: Track) -> StoredSequences:
    """Return sequences from the cache, filled by one process."""
    from scale_surgery.text.token_cache import open_stored, store

    folder = None if cache is None else str(cache)

    def make() -> str:
        sources = [parse_source(path) for path in paths]
        total = sum(source.bytes for source in sources)
        stamps = take_stamps(file for source in sources for file in source.files)
        with track("texts", total) as advance:
            texts = [_digest(source, advance) for source in sources]
        key = hashlib.sha256(repr([reader.made_of, texts]).encode()).hexdigest()[:40]

        def parts() -> Iterator[Sequences]:
            with track("tokens", total) as advance:
                yield from _unless_changed(reader.read(paths, advance), stamps)

        store(key, folder, parts(), {**reader.made_of, "texts": list(paths)})
        return key

    return open_stored(made_by_one(processes, make), folder)


def made_by_one(processes: Any, make: Callable[[], Any]) -> Any:
    """Run a function in one process, and return its result or raise its error in all."""
    from accelerate.utils import broadcast_object_list

    result: list[Any] = [None, ()]
    if processes.is_main_process:
        try:
            result[0] = make()
        except DataError as error:
            result[1] = error.problems
    if processes.num_processes > 1:
        broadcast_object_list(result)
    if result[1]:
        raise DataError(*result[1])
    return result[0]


def _unless_changed(parts: Iterator[Sequences], stamps: Stamps) -> Iterator[Sequences]:
    """Generate the sequences; raise an error at their end if the files changed since they were hashed for the key."""
    yield from parts
    try:
        check_unchanged(stamps)
    except CheckpointError as error:
        raise DataError(*error.problems) from error


def _is_large(paths: Sequence[str]) -> bool:
    sources = [parse_source(path) for path in paths]
    return any(source.is_on_hub for source in sources) or sum(source.bytes for source in sources) >= LARGE


def _digest(source: TextSource, advance: Progress) -> str:
    """Return the identity of a text: the format in which it is read, and the hash of its bytes."""
    settings = [source.column, source.split, source.config]
    if source.is_on_hub:
        return f"dataset {settings} {digest_of(source)}"
    if source.is_folder:
        files = [(str(file.relative_to(source.path)), hash_file(file, advance)) for file in source.files]
        return f"folder {settings} {files}"
    suffix = suffix_of(source.path)
    kind = suffix if suffix in (*LINES, ARRAY, *TABLES, *DATA_FILES) else "text"
    with readable(source.path), open_regular(source.path):
        return f"{kind} {settings} {hash_file(source.path, advance)}"
