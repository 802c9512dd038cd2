"""Models to measure, and their texts in the tokens of each; no weight is loaded here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery.checkpoint.expansions import BASE_NAME, ROUTER_KEY, path_names, specs_of_expansions
from scale_surgery.checkpoint.folder import Checkpoint, open_checkpoint
from scale_surgery.checkpoint.foreign import adopt_line
from scale_surgery.checkpoint.hashes import hash_file
from scale_surgery.checkpoint.names import MANIFEST_FILE
from scale_surgery.checkpoint.numbering import CONFIG_KEY
from scale_surgery.checkpoint.sources import find_source, is_local
from scale_surgery.errors import CheckpointError, DataError, Problem
from scale_surgery.folder.folder import Folder, with_record
from scale_surgery.folder.parts import base_tokenizer
from scale_surgery.folder.record import Manifest, read_manifest
from scale_surgery.running.context import choose_length, context_of
from scale_surgery.running.loading import load_config
from scale_surgery.running.options import RunOptions
from scale_surgery.running.tokenizer import check_token_ids, need_tokenizer
from scale_surgery.text.uses import texts_named_twice

if TYPE_CHECKING:
    from scale_surgery.text.documents import Document
    from scale_surgery.text.sequences import Sequences


def read_sides(files: Mapping[str, Sequence[str | Path]]) -> dict[str, list[Document]]:
    """Read the documents of old and of new texts."""
    from scale_surgery.text.documents import read_documents

    if twice := [problem for side, texts in files.items() for problem in texts_named_twice(f"--{side}", texts)]:
        raise DataError(*twice)
    documents = {side: list(read_documents(texts)) for side, texts in files.items()}
    empty = [
        Problem("texts-without-documents", f"--{side} {' '.join(map(str, texts))}")
        for side, texts in files.items()
        if texts and not documents[side]
    ]
    if empty:
        raise DataError(*empty)
    return documents


@dataclass(frozen=True)
class Subject:
    """A model to measure.

    Attributes:
        checkpoint: What was opened: a `Folder` if it has a surgery.json, from which its base can be restored.
        name: Its name in tables.
        is_expanded: True if it has an expansion, which can be disabled.
        is_fused: True if its blocks are joined with its base, so that neither can be measured alone.
        is_routed: True if it has a router, which can be disabled.
        record: Its surgery.json; None without one.
        base: Name of its base, the same for models that share one; None without a record. If it is itself the base of
            another measured model, the name of that base.
        tokenizer: Its tokenizer.
        base_tokenizer: Tokenizer of the base inside it if an expansion adds tokens; otherwise the same.
        context: Most tokens that it reads at once, or None if its config does not say.
        vocabulary: Number of token ids with embeddings.
    """

    checkpoint: Checkpoint
    name: str
    is_expanded: bool
    is_fused: bool
    is_routed: bool
    record: Manifest | None
    base: str | None
    tokenizer: Any
    base_tokenizer: Any
    context: int | None
    vocabulary: int

    @property
    def path(self) -> Path:
        """Its folder."""
        return self.checkpoint.path

    @property
    def manifest(self) -> Manifest | None:
        """Its surgery.json; None without one, and of a fused model, whose paths cannot be measured alone."""
        return self.checkpoint.manifest if isinstance(self.checkpoint, Folder) else None

    @property
    def expansions(self) -> tuple[str, ...]:
        """Names of its expansions if there are several, otherwise empty."""
        names = path_names(self.checkpoint.config.get(CONFIG_KEY, {}))[1:]
        return names if len(names) > 1 else ()

    @property
    def base_vocabulary(self) -> int:
        """Number of token ids of its base; ids from here on are new tokens."""
        if self.manifest is None or not self.manifest.adds_tokens:
            return self.vocabulary
        return self.manifest.first_plan.sizes.vocabulary

    def reads_new_tokens(self, expansion: str) -> bool:
        """Return True if this expansion, one of several, adds tokens."""
        return self.manifest is not None and self.manifest.plans[expansion].widths.new_tokens > 0

    def tokenizer_of(self, path: str | None) -> Any:
        """Return the tokenizer of a path: the base, an expansion, or all of the model (None)."""
        has_tokens = path is None or (path != BASE_NAME and self.reads_new_tokens(path))
        return self.tokenizer if has_tokens else self.base_tokenizer

    @property
    def runs(self) -> tuple[Mapping[str, Any], ...]:
        """The recorded training runs of its expansions."""
        expansions = () if self.manifest is None else self.manifest.expansions.values()
        return tuple(run for expansion in expansions for run in expansion.training)

    @property
    def is_base(self) -> bool:
        """True if it is itself the base of another measured model."""
        return self.base is not None and self.record is None


def open_subjects(
    models: Sequence[str | Path], run: RunOptions = RunOptions(), *, revision: str | None = None
) -> list[Subject]:
    """Open models: read their configs, tokenizers and records."""
    # one folder can be spelled in many ways
    places = {str(Path(model).resolve() if Path(model).exists() else model): str(model) for model in reversed(models)}
    given = list(reversed(places.values()))
    if not given:
        raise CheckpointError(Problem("models-missing"))
    # folders have none, beside Hub repositories that do
    revisions = {model: revision for model in given if not is_local(model)} or dict.fromkeys(given, revision)
    subjects = [_open(model, revisions.get(model), run) for model in given]
    uses = Counter(subject.name for subject in subjects)
    named = [
        subject if uses[subject.name] == 1 else replace(subject, name=model)
        for subject, model in zip(subjects, given, strict=True)
    ]
    return [replace(subject, base=base) for subject, base in zip(named, _name_bases(named), strict=True)]


def _name_bases(subjects: Sequence[Subject]) -> Iterator[str | None]:
    names, given = dict(_named_bases(subjects)), set[str]()
    for subject in subjects:
        if subject.record is not None:
            yield names[subject.name]
            continue
        base = next((names[candidate.name] for candidate in subjects if _is_base(subject, candidate)), None)
        # a second copy of a base is a model like any other
        yield base if base not in given else None
        given |= {base} if base is not None else set()


def _is_base(subject: Subject, candidate: Subject) -> bool:
    """Return True if a folder holds every file of another model's base, byte for byte."""
    if candidate.record is None:
        return False
    files = {subject.path / name: file for name, file in candidate.record.base_files.items()}
    if not all(path.is_file() and path.stat().st_size == file.bytes for path, file in files.items()):
        return False
    return all(hash_file(path) == file.sha256 for path, file in files.items())


def _named_bases(subjects: Sequence[Subject]) -> Iterator[tuple[str, str]]:
    """Generate the name of each model with a record, with the name of its base."""
    names: dict[tuple[tuple[str, str], ...], str] = {}
    for subject in subjects:
        record = subject.record
        if record is None:
            continue
        files = tuple(sorted((name, file.sha256) for name, file in record.base_files.items()))
        name = f"{record.base_name} (base)"
        # two bases with the same name but different files, for example of another revision
        unique = name if name not in names.values() else f"{record.base_name} (base of {subject.name})"
        yield subject.name, names.setdefault(files, unique)


def _open(model: str, revision: str | None, run: RunOptions) -> Subject:
    source = find_source(model, revision)
    checkpoint = open_checkpoint(source.path)
    specs = checkpoint.config.get(CONFIG_KEY, {})
    is_fused = any(recorded.get("fused", False) for recorded in specs_of_expansions(specs))
    is_expanded = bool(specs) and not is_fused
    record = read_manifest(source.path) if specs and (source.path / MANIFEST_FILE).is_file() else None
    if is_expanded and record is not None:
        checkpoint = with_record(checkpoint, record)
    elif is_expanded and any(entry.get("head", {}).get("new_tokens") for entry in specs_of_expansions(specs)):
        # the base would be asked to predict tokens that it does not have
        raise CheckpointError(Problem("saved-with-new-tokens", model, adopt=adopt_line(source.path)))
    config = load_config(source.path, source.name, run)
    tokenizer = need_tokenizer(source.path, source.name, run)
    return Subject(
        checkpoint=checkpoint,
        name=source.name,
        is_expanded=is_expanded,
        is_fused=is_fused,
        # no path of a fused model can be measured alone
        is_routed=ROUTER_KEY in specs and not is_fused,
        record=record,
        base=None,
        tokenizer=tokenizer,
        base_tokenizer=base_tokenizer(checkpoint, tokenizer, run) if isinstance(checkpoint, Folder) else tokenizer,
        context=context_of(config),
        vocabulary=config.vocab_size,
    )


def choose_lengths(subjects: Sequence[Subject], length: int | None, step: int | None) -> tuple[int, int]:
    """Choose the windows, the same for all models, so that their losses can be compared."""
    length = choose_length(length, {subject.name: subject.context for subject in subjects})
    step = max(1, length // 2) if step is None else step
    if not 1 <= step < length:
        raise DataError(Problem("step-out-of-range", "step", step=step, most=length - 1))
    return length, step


def tokens_before(subjects: Sequence[Subject]) -> list[list[int]]:
    """Return for each model the tokens to put before each text: the same ones for all that share a base."""
    from scale_surgery.text.tokenizing import start_tokens

    needed = {subject.base: before for subject in subjects if (before := _token_before(subject))}
    bases = {subject.base for subject in subjects} - {None}

    def shared(subject: Subject) -> list[int]:
        if subject.base is not None or len(bases) > 1:
            return needed.get(subject.base, [])
        # a model without expansion is compared with the only base, if it reads the same tokens
        reads_alike = not start_tokens(subject.tokenizer)
        return next(
            (before for before in needed.values() if [subject.tokenizer.eos_token_id] == before and reads_alike), []
        )

    return [shared(subject) for subject in subjects]


def _token_before(subject: Subject) -> list[int]:
    from scale_surgery.text.tokenizing import token_before

    return token_before(subject.tokenizer, subject.base_tokenizer)


def sequences_of(
    subject: Subject,
    tokenizer: Any,
    documents: Mapping[str, Sequence[Document]],
    length: int,
    step: int,
    before: Sequence[int] | None = None,
) -> dict[str, Sequences]:
    """Return windows of documents in the tokens of a model's tokenizer, or of its base's.

    Documents are old and new text, or those of --text by their files. `before` are tokens to put before each document;
    default: those that this model needs.
    """
    from scale_surgery.text.tokenizing import start_tokens, stride, tokenize

    texts, before = {}, _token_before(subject) if before is None else before
    for side, some in documents.items():
        if not some:
            continue
        windows = stride(tokenize(some, tokenizer, before=before), length, step, start_tokens(tokenizer))
        check_token_ids(subject.name, windows.highest, subject.vocabulary, f"the {side} text")
        if not windows.scored:
            place = f"--{side}" if side in ("old", "new") else f"--text {side}"
            raise DataError(Problem("side-unpredicted", place, model=subject.name))
        texts[side] = windows
    return texts
