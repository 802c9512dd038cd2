"""Check the files of an expanded folder against surgery.json: nothing is missing, changed or added.

`verify` reports the result. Commands that make another folder from an expanded one refuse a damaged one: its record
would vouch for the damage.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from scale_surgery.checkpoint.folder import Checkpoint, read_config, read_tensor, read_text
from scale_surgery.checkpoint.hashes import Sums, hash_all, hash_file, hash_tensors
from scale_surgery.checkpoint.names import MANIFEST_FILE, TOKENIZER_CONFIG_FILE
from scale_surgery.checkpoint.reading import differing_keys, parse_json
from scale_surgery.errors import CheckpointError, Problem
from scale_surgery.folder.config import config_problems
from scale_surgery.folder.folder import Folder
from scale_surgery.folder.joining import gram_size, joined_tensors, renamed_tensors, tied_head
from scale_surgery.folder.parts import described_parts, hash_parts, rebuilt_shard
from scale_surgery.folder.record import BaseTensor, Manifest
from scale_surgery.folder.renumbered import hash_stored
from scale_surgery.folder.write import EXTENDED, tokenizer_texts
from scale_surgery.planning.tensors import TensorPlan
from scale_surgery.progress import Progress, Track, no_progress
from scale_surgery.running.tokenizer import TOKENIZER_FILES, VOCABULARY_FILES


@dataclass(frozen=True)
class IntegrityReport:
    """Differences from what was written, by kind; an empty tuple means that the check passed.

    Attributes:
        base: Base tensors and files that are not what they were.
        structure: Expansion tensors that are missing, unexpected, of a wrong dtype or shape, not what the last run left
            them, or where no W12 may be.
        missing: Those of `structure` without which the model does not load.
        config: Keys of config.json and of the tokenizer's that are not what the expansion wrote.
        code: Code files that are missing, unknown, or not what the expansion wrote.
        hashes: sha256 of each base tensor that is there.
        expansion: sha256 of each expansion tensor that is there.
    """

    base: tuple[Problem, ...]
    structure: tuple[Problem, ...]
    missing: tuple[Problem, ...]
    config: tuple[Problem, ...]
    code: tuple[Problem, ...]
    hashes: Mapping[str, str]
    expansion: Mapping[str, str]

    @property
    def problems(self) -> list[Problem]:
        """The problems of all kinds, whoever wrote the code files."""
        return [*self.base, *self.structure, *self.config, *self.code]


def check_integrity(folder: Folder, advance: Progress = no_progress) -> IntegrityReport:
    """Check an expanded folder against its surgery.json; each problem names its tensor or file."""
    manifest = folder.manifest
    # what the folder says of all its expansions is checked for all, whichever are looked at
    planned, whole = manifest.planned, folder.of_all
    files, hashes, expansion = _hash_all(folder, planned, advance)
    missing = _damaged(folder, planned)
    return IntegrityReport(
        base=base_problems(folder, Sums(files, hashes)),
        structure=(
            *missing,
            *_unexpected_tensors(folder, planned),
            *_spoiled(manifest, expansion),
            *_spoiled_matrices(folder),
        ),
        missing=tuple(missing),
        config=(*config_problems(whole.manifest, whole.config), *tokenizer_problems(whole)),
        code=tuple(_code_problems(folder, manifest.code_files)),
        hashes={name: hashes[name] for name in manifest.base_tensors if name in hashes},
        expansion=expansion,
    )


def bytes_of_model(folder: Folder) -> int:
    """Return the number of bytes that `check_integrity` reads, for a progress bar."""
    manifest = folder.manifest
    stored = {file.stored_as: file.bytes for file in manifest.base_files.values() if file.stored_as is not None}
    files = {name: size for name, size in stored.items() if name not in manifest.joined_shards}
    parts = described_parts(folder)
    beside = [parts[name] for name in _base_parts(manifest).values() if name in parts]
    moved = [part for part in beside if part.file not in files or part.file in manifest.renumbered]
    blocks = [parts[name] for name in manifest.planned if name in parts]
    return sum(files.values()) + sum(part.bytes for part in (*moved, *blocks))


def refuse_damaged(folder: Folder, track: Track, also: Iterable[Problem] = (), *, is_trusted: bool = False) -> None:
    """Refuse an expanded folder that is not what was written, or what the last run left; every byte is read."""
    with track("hashes", bytes_of_model(folder)) as advance:
        report = check_integrity(folder, advance)
    # another release may have written other code files; where `is_trusted`, its own code and config may run, whoever
    # wrote them
    code = () if is_trusted else (*report.config, *_code_problems(folder, folder.manifest.code))
    if problems := dict.fromkeys([*report.base, *report.structure, *code, *also]):
        raise CheckpointError(Problem("folder-damaged", folder.path, *problems))


def _hash_all(
    folder: Folder, planned: Mapping[str, TensorPlan], advance: Progress
) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Hash the base's files, by their names in the folder, its tensors and the expansion's; none that is missing."""
    manifest = folder.manifest
    names = dict.fromkeys(file.stored_as for file in manifest.base_files.values() if file.stored_as is not None)
    there = [name for name in names if name not in manifest.joined_shards and (folder.path / name).is_file()]
    # a shard that lies here as it was is read once for both
    as_it_was = [name for name in there if name not in manifest.renumbered]
    sums = hash_all(folder, as_it_was, advance)
    files, tensors = sums.files, sums.tensors
    files |= hash_stored(folder.path, manifest, [name for name in there if name not in files], advance)
    # of a fused model, too, a tensor is read once for itself and for its shard
    rebuilt = {name: _hash_rebuilt(folder, name, advance) for name in names if name in manifest.joined_shards}
    for sums in rebuilt.values():
        tensors |= sums.tensors
    parts = _base_parts(manifest)
    tensors |= hash_parts(folder, [*(name for name in parts if name not in tensors), *planned], advance)
    base, expansion = ({name: tensors[name] for name in some if name in tensors} for some in (parts, planned))
    if not _tensor_problems(manifest, base):
        files |= {name: sums.files.get(name, "") for name, sums in rebuilt.items()}
    return files, base, expansion


def _hash_rebuilt(folder: Folder, name: str, advance: Progress) -> Sums:
    """Hash a shard of the base as `strip` would write it, and its tensors; nothing if its header fits no tensors."""
    try:
        shard = rebuilt_shard(folder, name)
        whole, tensors = hashlib.sha256(shard.header), dict[str, str]()
        for entry in shard.entries:
            digest = hashlib.sha256()
            for chunk in entry.read():
                whole.update(chunk)
                digest.update(chunk)
                advance(len(chunk))
            tensors[entry.name] = digest.hexdigest()
    except CheckpointError:
        return Sums({}, {})
    return Sums({name: whole.hexdigest()}, tensors)


def _base_parts(manifest: Manifest) -> dict[str, str]:
    """Map the name of each base tensor in the folder to its name in the base."""
    # a fused model holds that of a tied embedding a second time, in its head
    head = None if manifest.fused is None else tied_head(manifest)
    return {name: name for name in manifest.base_tensors} | ({} if head is None else {head.name: head.base})


def base_problems(folder: Folder, sums: Sums) -> tuple[Problem, ...]:
    """List changed and missing base tensors, and base files by their names in the folder."""
    return (*_tensor_problems(folder.manifest, sums.tensors), *_file_problems(folder, sums.files))


def _tensor_problems(record: Manifest, hashes: Mapping[str, str]) -> list[Problem]:
    recorded = {name: record.base_tensors[base].sha256 for name, base in _base_parts(record).items()}
    return list(_changed(hashes, recorded))


def _spoiled(manifest: Manifest, hashes: Mapping[str, str]) -> Iterator[Problem]:
    """Generate a problem for each trained expansion tensor that differs from its recorded sha256."""
    for expansion in manifest.expansions.values():
        known = {} if expansion.trained is None else {**expansion.tensors, **expansion.trained}
        for name, digest in known.items():
            if hashes.get(name, digest) != digest:
                yield Problem("tensor-changed", name, found=hashes[name], recorded=digest)


def _spoiled_matrices(folder: Folder) -> Iterator[Problem]:
    """Generate a problem for each tensor that fusing made of base and expansion, if it changed since."""
    made = {} if folder.manifest.fused is None else folder.manifest.fused["made"]
    return _changed(hash_tensors(folder, [name for name in made if name in folder.tensors]), made)


def _changed(hashes: Mapping[str, str], recorded: Mapping[str, str]) -> Iterator[Problem]:
    """Generate a problem for each tensor that is missing or has another sha256 than recorded."""
    for name, digest in recorded.items():
        if name not in hashes:
            yield Problem("tensor-missing", name)
        elif hashes[name] != digest:
            yield Problem("tensor-changed", name, found=hashes[name], recorded=digest)


def _file_problems(folder: Folder, hashes: Mapping[str, str]) -> list[Problem]:
    record, problems = folder.manifest, list[Problem]()
    joined, changed = record.joined_shards, record.changed_texts
    for name, file in record.base_files.items():
        if file.stored_as in joined and file.stored_as not in hashes:
            continue  # a shard of a fused model of which a tensor is damaged
        if file.stored_as is None:
            if name in changed:
                problems.append(Problem("base-text-changed", MANIFEST_FILE, file=name))
        elif file.stored_as not in hashes:
            problems.append(Problem("base-file-missing", file.stored_as, file=name))
        elif hashes[file.stored_as] != file.sha256:
            problems.append(Problem("base-file-changed", file.stored_as, file=name))
    stored = {file.stored_as for file in record.base_files.values()}
    if joined:
        return problems
    shards = {folder.tensors[name].file for name in record.base_tensors if name in folder.tensors}
    return problems + [Problem("shard-not-of-base", shard) for shard in sorted(shards - stored)]


def _damaged(folder: Folder, planned: Mapping[str, TensorPlan]) -> list[Problem]:
    """List expansion tensors, and all of a fused model, that are missing, or of a wrong dtype or shape.

    A sha256 of a tensor is of its numbers' bytes alone, and shows no other dtype.
    """
    # base shards in blocks are compared as files
    forms = {name: (tensor.dtype, tensor.shape) for name, tensor in planned.items()}
    if (fused := folder.manifest.fused) is not None:
        forms = _fused_forms(folder, planned, fused["made"])
    problems = [Problem("tensor-missing", name) for name in forms if name not in folder.tensors]
    for name, form in forms.items():
        if name in folder.tensors:
            problems += folder.tensors[name].differences(*form)
    return problems


def _fused_forms(
    folder: Folder, planned: Mapping[str, TensorPlan], made: Iterable[str]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of each tensor of a fused model; base tensors that are missing are left out."""
    manifest = folder.manifest
    parts: dict[str, BaseTensor | TensorPlan] = {**manifest.base_tensors, **planned}
    renamed, joined = renamed_tensors(manifest), [*joined_tensors(manifest)]
    inside = {name for item in joined for name in item.pieces.values()}
    kept = {
        stored: (part.dtype, part.shape)
        for name, part in parts.items()
        if (stored := renamed.get(name, name)) in folder.tensors or (name in planned and name not in inside)
    }
    gram = {name: ("F32", (gram_size(manifest),) * 2) for name in made}
    return kept | {item.name: (parts[item.base].dtype, item.shape) for item in joined} | gram


def _unexpected_tensors(folder: Folder, planned: Mapping[str, TensorPlan]) -> list[Problem]:
    manifest = folder.manifest
    known = {*planned, *manifest.base_tensors}
    if manifest.fused is not None:
        known |= {item.name for item in joined_tensors(manifest)} | set(renamed_tensors(manifest).values())
        known |= set(manifest.fused["made"])
    return [_unexpected(folder, name) for name in folder.tensors if name not in known]


def tokenizer_problems(folder: Folder) -> list[Problem]:
    """List tokenizer files, and keys of tokenizer_config.json, that are not the base's; a key can name code."""
    manifest = folder.manifest
    problems = list[Problem]()
    # to a base that has no tokenizer a user may add one, though none that names code
    is_theirs = not manifest.base_files.keys() & set(TOKENIZER_FILES)
    if not is_theirs:
        # the config is compared by its keys
        names = [name for name in (*TOKENIZER_FILES, *VOCABULARY_FILES) if name != TOKENIZER_CONFIG_FILE]
        problems += [Problem("tokenizer-file-added", name) for name in added_files(folder, names)]
    # those that are not replaced are compared as files
    replaced = {name: manifest.replaced[name] for name in EXTENDED if name in manifest.replaced}
    if TOKENIZER_CONFIG_FILE not in manifest.base_files:
        replaced[TOKENIZER_CONFIG_FILE] = "{}"
    for name, text in tokenizer_texts(manifest.plans.values(), replaced).items():
        if (folder.path / name).is_file():
            if read_text(folder, name) == text:
                continue  # to parse a large vocabulary takes seconds
            differing = differing_keys(read_config(folder.path / name), parse_json(text))
            differing = [key for key in differing if (key == "auto_map" if is_theirs else key != "tokenizer_class")]
            problems += [Problem("tokenizer-key-changed", f"{name}: {key}") for key in differing]
        elif name in manifest.replaced:
            problems.append(Problem("file-missing", name))
    return problems


def added_files(folder: Folder, names: Iterable[str]) -> list[str]:
    """Return the given names of top-level files that the folder has and the base has not."""
    return [name for name in names if name in folder.side_files and name not in folder.manifest.base_files]


def _unexpected(checkpoint: Checkpoint, name: str) -> Problem:
    if not name.endswith(".w12"):
        return Problem("tensor-unplanned", name, shard=checkpoint.tensors[name].file)
    return Problem("block-not-zero", name, count=int(read_tensor(checkpoint, name).count_nonzero()))


def _code_problems(folder: Folder, names: Iterable[str]) -> list[Problem]:
    problems = []
    for file in names:
        if not (folder.path / file).is_file():
            problems.append(Problem("file-missing", file))
        elif hash_file(folder.path / file) != folder.manifest.code.get(file):
            problems.append(Problem("code-changed", file))
    known = {*names, *(file.stored_as for file in folder.manifest.base_files.values())}
    unknown = [file for file in folder.side_files if file.endswith(".py") and file not in known]
    return problems + [Problem("code-unknown", file) for file in unknown]
