"""What files alone can show of a composed folder: whether it holds what was written, all of it and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

from scale_surgery import modeling
from scale_surgery.checkpoint.expansions import renamed
from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.checkpoint.hashes import FileHash, Sums, hash_all, hash_file, tensors_by_file
from scale_surgery.checkpoint.names import CONFIG_FILE, EXTRACT_FILE
from scale_surgery.checkpoint.reading import parse_json
from scale_surgery.checkpoint.shards import header_bytes
from scale_surgery.composition.config import composed_config, config_problems
from scale_surgery.composition.members import check_header, files_in, manifest_of, tensors_of
from scale_surgery.composition.record import Composition, folder_of
from scale_surgery.errors import CheckpointError, shorten
from scale_surgery.progress import Progress, Track, no_progress
from scale_surgery.surgery.extract_folder import ExtractRecord, name_in_extract, read_record
from scale_surgery.surgery.intact import base_problems, tokenizer_problems
from scale_surgery.surgery.record import Manifest
from scale_surgery.surgery.renumbered import behind_header, with_length


@dataclass(frozen=True)
class Damage:
    """What is not as it was written, by kind; an empty tuple means that the check passed.

    Attributes:
        base: Base tensors and files that are not what they were.
        expansions: Files and tensors of expansions that are missing, unknown, or not what their extracts held.
        config: Keys of config.json that are not what was written.
        code: Code files that are missing, unknown, or not what was written.
        hashes: sha256 of each tensor of an expansion that is there.
    """

    base: tuple[str, ...]
    expansions: tuple[str, ...]
    config: tuple[str, ...]
    code: tuple[str, ...]
    hashes: Mapping[str, str] = field(default_factory=dict)

    @property
    def problems(self) -> list[str]:
        """All of it."""
        return [*self.base, *self.expansions, *self.config, *self.code]


def find_damage(checkpoint: Checkpoint, record: Composition, advance: Progress = no_progress) -> Damage:
    """Check a composed folder against its records; every byte of it is read.

    Args:
        checkpoint: The composed folder.
        record: Its composed.json.
        advance: Called with the bytes done.

    Returns:
        Every problem, each naming its tensor or file.
    """
    stored = [file.stored_as for file in record.base_files.values() if file.stored_as is not None]
    there = [place for place in stored if (checkpoint.path / place).is_file()]
    base = base_problems(checkpoint, record, hash_all(checkpoint, there, advance))
    expansions: list[str] = []
    manifests: dict[str, Manifest] = {}
    sums = Sums()
    for name in record.names:
        try:
            manifests[name] = manifest_of(checkpoint.path, name)
            expansions += _member_problems(checkpoint, record, name, manifests[name], sums, advance)
        except CheckpointError as error:
            expansions.append(f"{name}: {error}")
    expansions += _unknown(checkpoint, record)
    # without any expansion, and without what one was planned to be, nobody knows what was written
    is_known = 0 < len(manifests) == len(record.names)
    config = _config_problems(checkpoint, record, manifests) if is_known else []
    config += tokenizer_problems(checkpoint, record)
    code = tuple(_code_problems(checkpoint, record))
    return Damage(base, tuple(expansions), tuple(config), code, sums.tensors)


def bytes_to_check(checkpoint: Checkpoint, record: Composition) -> int:
    """Bytes that `find_damage` reads, for a progress bar."""
    base = sum(file.bytes for file in record.base_files.values() if file.stored_as is not None)
    return base + sum(files_in(checkpoint.path, name).total for name in record.names)


def refuse_damaged(checkpoint: Checkpoint, record: Composition, track: Track) -> None:
    """Refuse a composed folder that is not what was written.

    Raises:
        CheckpointError: If it is not; every problem is named.
    """
    with track("hashes", bytes_to_check(checkpoint, record)) as advance:
        found = find_damage(checkpoint, record, advance)
    if problems := found.problems:
        cure = ", or leave the expansion out by --remove" if found.expansions else ""
        advice = (
            f"{checkpoint.path}: is not what was written, so nothing is made of it. Restore what is named{cure}; "
            f"scale-surgery verify {checkpoint.path} shows all."
        )
        raise CheckpointError.from_problems([*shorten(problems), advice])


def _member_problems(
    checkpoint: Checkpoint, record: Composition, name: str, manifest: Manifest, sums: Sums, advance: Progress
) -> Iterator[str]:
    """Files of an expansion that are not what its extract.json says, and another base than that of the folder.

    The sums of its tensors are collected on the way.
    """
    folder = checkpoint.path / folder_of(name)
    wanted = read_record(folder / EXTRACT_FILE)
    if dict(manifest.base_tensors) != dict(record.base_tensors):
        yield f"{name}: was made on another base than that of this folder."
    yield from _file_problems(checkpoint, record, name, wanted, sums, advance)
    planned = {renamed(tensor.name, name): tensor.shape for tensor in manifest.plan.tensors}
    found = {tensor: checkpoint.tensors[tensor].shape for tensor in tensors_of(checkpoint, name)}
    for tensor in sorted({*planned, *found}):
        if planned.get(tensor) != found.get(tensor):
            yield f"{tensor}: shape {found.get(tensor)}, expected {planned.get(tensor)} from the plan."


def _file_problems(
    checkpoint: Checkpoint, record: Composition, name: str, wanted: ExtractRecord, sums: Sums, advance: Progress
) -> Iterator[str]:
    path, headers = checkpoint.path, record.expansions[name].headers
    for file, entry in wanted.files.items():
        place = f"{folder_of(name)}/{name_in_extract(file)}"
        if not (path / place).is_file():
            yield f"{place}: file is missing."
            continue
        if file in headers:
            check_header(path, record, name, file)
            _hash_as_extracted(checkpoint, place, headers[file], sums, advance)
        elif file.endswith(".safetensors"):
            found = hash_all(checkpoint, [place], advance)
            sums.files.update(found.files)
            sums.tensors.update(found.tensors)
        else:
            sums.files[place] = hash_file(path / place, advance)
        if sums.files[place] != entry.sha256:
            yield f"{place}: sha256 {sums.files[place][:16]}..., expected {entry.sha256[:16]}..."
    known = {*map(name_in_extract, wanted.files), *wanted.licences, EXTRACT_FILE}
    unknown = sorted(set(files_in(path, name).sizes) - known)
    yield from (f"{folder_of(name)}/{file}: is no file of this expansion. Take it away." for file in unknown)


def _hash_as_extracted(checkpoint: Checkpoint, place: str, header: str, sums: Sums, advance: Progress) -> None:
    """sha256 of what a shard is in the extract, and of the tensors in it; each byte is read once."""
    file, before = checkpoint.path / place, with_length(header.encode("utf-8"))
    moved = len(before) - len(header_bytes(file))
    held = [replace(info, offset=info.offset + moved) for info in tensors_by_file(checkpoint).get(place, [])]
    found = FileHash(held)
    for chunk in behind_header(file, before):
        found.update(chunk)
        advance(len(chunk))
    found.add_to(sums, place)


def _unknown(checkpoint: Checkpoint, record: Composition) -> Iterator[str]:
    """Tensors of a composed folder that are neither the base's nor of an expansion."""
    known = {*record.base_tensors, *chain.from_iterable(map(partial(tensors_of, checkpoint), record.names))}
    yield from (f"{name}: no such tensor in the base or an expansion." for name in checkpoint.tensors.keys() - known)


def _config_problems(checkpoint: Checkpoint, record: Composition, manifests: Mapping[str, Manifest]) -> list[str]:
    base = parse_json(record.replaced[CONFIG_FILE])
    dtype = checkpoint.config.get("torch_dtype", "")
    return config_problems(composed_config(base, dtype, manifests, record.mixing), checkpoint.config)


def _code_problems(checkpoint: Checkpoint, record: Composition) -> Iterator[str]:
    """Code that is not what was written, or that no release wrote, whatever the record vouches for."""
    for file, digest in record.code.items():
        found = hash_file(checkpoint.path / file) if (checkpoint.path / file).is_file() else None
        if found is None:
            yield f"{file}: code file is missing."
        elif found != digest or not modeling.is_ours(file, digest):
            yield f"{file}: is not the code that compose wrote. Read it before you trust it."
    known = {*record.code, *(file.stored_as for file in record.base_files.values())}
    inside = tuple(f"{folder_of(name)}/" for name in record.names)
    others = [file for file in checkpoint.side_files if file.endswith(".py") and not file.startswith(inside)]
    yield from (f"{file}: unknown code file. Read it before you trust it." for file in others if file not in known)
