"""Put many expansions of one base into one folder: switched by name, or weighed by a router over K + 1 paths.

base files       --as files-->                      the same
each extract     --as files, shards under its name--> expansions/NAME/
config.json, *.py, index, composed.json             say which expansions, and how they are mixed
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from scale_surgery import modeling
from scale_surgery.checkpoint.expansions import renamed
from scale_surgery.checkpoint.files import BaseWeights, check_base_weights, take_over, write_json, write_text
from scale_surgery.checkpoint.folder import open_checkpoint, read_text
from scale_surgery.checkpoint.headers import TensorInfo, read_header
from scale_surgery.checkpoint.names import COMPOSED_FILE, CONFIG_FILE, INDEX_FILE
from scale_surgery.checkpoint.sources import find_source
from scale_surgery.checkpoint.staging import check_space, check_target, staged
from scale_surgery.checkpoint.stamps import Stamps
from scale_surgery.composition.checks import check_base, check_names, check_runs_beside, named_extracts
from scale_surgery.composition.config import composed_config, index_of
from scale_surgery.composition.ground import Ground, base_bytes, ground_in, ground_of, open_base
from scale_surgery.composition.members import (
    Files,
    files_in,
    files_of,
    manifest_of,
    member_of,
    place_files,
    stored_headers,
)
from scale_surgery.composition.record import Composition, Member, Mixing, folder_of
from scale_surgery.errors import CheckpointError
from scale_surgery.planning.architecture import CODE_FILES
from scale_surgery.planning.reserved import check_clashes
from scale_surgery.progress import Progress, Track, no_track
from scale_surgery.running.tokenizer import TOKENIZER_CONFIG_FILE, pin_tokenizer_class
from scale_surgery.surgery.around import running_dtype
from scale_surgery.surgery.config import hash_texts
from scale_surgery.surgery.extract_folder import Extract, open_extract
from scale_surgery.surgery.record import Manifest, tool_versions
from scale_surgery.surgery.same_base import check_fit


@dataclass(frozen=True)
class Composed:
    """What `compose` did.

    Attributes:
        path: The composed folder.
        base_name: What its base model is called.
        expansions: Tensors of each expansion, by its name, in the order of the paths.
        mixing: How the paths are mixed.
        bytes_added: Bytes of all expansions.
        left_out: Files that were not taken along.
        removed: Expansions of a composed folder that were left out. They may have been damaged; all else was not.
    """

    path: Path
    base_name: str
    expansions: Mapping[str, int]
    mixing: Mixing
    bytes_added: int
    left_out: tuple[str, ...]
    removed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Part:
    """An expansion that goes into a composed folder.

    Attributes:
        files: Its files.
        member: What composed.json says of it.
        manifest: Its surgery.json.
        is_stored: Whether its shards have the names of a composed folder already.
        stamps: What the system said of its files before they were read.
    """

    files: Files
    member: Member
    manifest: Manifest
    is_stored: bool
    stamps: Stamps


def compose(
    base: str | Path,
    extracts: Mapping[str, str | Path] | Sequence[str | Path] | str | Path,
    output: str | Path,
    *,
    remove: Sequence[str] | str = (),
    mixing: Mixing | None = None,
    base_weights: BaseWeights = "auto",
    overwrite: bool = False,
    track: Track = no_track,
) -> Composed:
    """Write one folder of a base and many expansions, which loads as one model whose router weighs K + 1 paths.

    Args:
        base: The base model, a folder or a Hub id; or a composed folder, whose expansions stay.
        extracts: Extracts by the names that they get; one alone, or each of a list, is called as its folder is,
            with _ in place of hyphens and dots.
        output: Folder to be.
        remove: Expansions of a composed folder that are left out, damaged or not; all else must be what was written.
        mixing: How the paths are mixed. Default: all paths alike, a switch rate of 1 %; of a composed folder as there.
        base_weights: How base shards are taken over: "auto", "copy" or "link".
        overwrite: Whether an existing output folder may be replaced.
        track: Makes progress bars.

    Returns:
        What was done.

    Raises:
        CheckpointError: If something is no extract, was made on another base (the tensors are named), or the output
            cannot be written.
        PlanError: If a name cannot be had, the numbers make no sense, or an expansion cannot run beside others.
    """
    target, source = Path(output), find_source(base)
    check_base_weights(base_weights)
    remove = (remove,) if isinstance(remove, str) else tuple(dict.fromkeys(remove))
    given, before = open_base(source, remove)
    wanted = named_extracts(extracts)
    opened = {name: open_extract(extract) for name, extract in wanted.items()}
    check_target(target, [source.path, *(own.path for own in opened.values())], overwrite=overwrite)
    check_runs_beside(opened)
    for extract in opened.values():
        check_fit(extract, given, source.name)
    if before is None:
        check_clashes(given)
    # whether torch has a name for itself is known seconds later
    check_names(wanted, remove, () if before is None else before.names, mixing)
    added = _bytes_added(source.path, before, remove, opened)
    check_space(target, added + base_bytes(given) * (base_weights == "copy"))
    # what can be known without reading the base was asked before
    ground = ground_of(source, given, track) if before is None else ground_in(source, given, before, remove, track)
    for name, extract in opened.items():
        check_base(name, extract, ground, track)
    parts = _kept_parts(source.path, before, remove)
    parts |= {name: _new_part(name, extract) for name, extract in opened.items()}
    mixing = _mixing(mixing, before, list(parts))
    state = {
        "compose": {name: [asdict(part.member), dict(part.files.sizes)] for name, part in parts.items()},
        "mixing": asdict(mixing),
        "base_weights": base_weights,
    }
    stamps = {**ground.base.stamps, **{file: own for part in parts.values() for file, own in part.stamps.items()}}
    with staged(target, state, stamps, overwrite=overwrite) as partial:
        _write(partial, ground, parts, mixing, base_weights, track)
    tensors = {name: len(part.manifest.plan.tensors) for name, part in parts.items()}
    return Composed(target, ground.base_name, tensors, mixing, added, ground.left_out, remove)


def _new_part(name: str, extract: Extract) -> Part:
    return Part(files_of(extract), member_of(extract, name), extract.manifest, is_stored=False, stamps=extract.stamps)


def _bytes_added(path: Path, record: Composition | None, remove: Sequence[str], opened: Mapping[str, Extract]) -> int:
    """Bytes of all expansions that are to be in the folder."""
    kept = () if record is None else (name for name in record.names if name not in remove)
    return sum(files_in(path, name).total for name in kept) + sum(files_of(own).total for own in opened.values())


def _kept_parts(path: Path, record: Composition | None, remove: Sequence[str]) -> dict[str, Part]:
    """Expansions of a composed folder that stay; its files were hashed, and have stamps with it."""
    kept = [] if record is None else [(name, own) for name, own in record.expansions.items() if name not in remove]
    return {
        name: Part(files_in(path, name), member, manifest_of(path, name), is_stored=True, stamps={})
        for name, member in kept
    }


def _mixing(given: Mixing | None, before: Composition | None, names: list[str]) -> Mixing:
    """What is asked for; else what was there, all paths alike where these are others."""
    if given is not None or before is None:
        return given or Mixing()
    return before.mixing if list(before.names) == names else replace(before.mixing, prior=None)


def _write(
    partial: Path, ground: Ground, parts: Mapping[str, Part], mixing: Mixing, how: BaseWeights, track: Track
) -> None:
    total = sum(part.files.total for part in parts.values()) + sum(own.stat().st_size for own in ground.taken.values())
    with track("files", total) as advance:
        _take_over_base(partial, ground, how, advance)
        for name, part in parts.items():
            headers = {} if part.is_stored else stored_headers(name, part.member)
            place_files(part.files, partial / folder_of(name), headers, how, advance)
    manifests = {name: part.manifest for name, part in parts.items()}
    architecture = next(iter(manifests.values())).plan.architecture
    code = modeling.code_texts(architecture, CODE_FILES)
    for file, text in code.items():
        write_text(partial / file, text)
    config = composed_config(ground.base.config, running_dtype(ground.base), manifests, mixing)
    write_json(partial / CONFIG_FILE, config)
    replaced = {**ground.replaced, **_pin_tokenizer(ground, partial)}
    write_json(partial / INDEX_FILE, index_of(_tensors(partial, ground, parts)))
    write_json(partial / COMPOSED_FILE, asdict(_record(ground, parts, mixing, replaced, hash_texts(code))))
    _check_written(partial, ground, parts)


def _record(
    ground: Ground, parts: Mapping[str, Part], mixing: Mixing, replaced: Mapping[str, str], code: Mapping[str, str]
) -> Composition:
    return Composition(
        base_name=ground.base_name,
        base_revision=ground.base_revision,
        base_fingerprint=ground.fingerprint,
        base_files={
            name: replace(file, stored_as=None) if name in replaced else file for name, file in ground.files.items()
        },
        base_tensors=ground.tensors,
        left_out=ground.left_out,
        replaced=replaced,
        code=code,
        expansions={name: part.member for name, part in parts.items()},
        mixing=mixing,
        tool=tool_versions(),
    )


def _take_over_base(partial: Path, ground: Ground, how: BaseWeights, advance: Progress) -> None:
    for stored, file in ground.taken.items():
        (partial / stored).parent.mkdir(parents=True, exist_ok=True)
        # small files, which a program may edit in place, are always copies
        take_over(file, partial / stored, how if stored.endswith(".safetensors") else "copy")
        advance(file.stat().st_size)


def _pin_tokenizer(ground: Ground, partial: Path) -> dict[str, str]:
    """Name the base's tokenizer class where transformers would choose another; the text that this replaces."""
    file = ground.base.path / TOKENIZER_CONFIG_FILE
    if ground.composed is not None:
        if TOKENIZER_CONFIG_FILE not in ground.taken and file.is_file():
            take_over(file, partial / TOKENIZER_CONFIG_FILE, "copy")
        return {}
    pinned = pin_tokenizer_class(ground.base.path, partial)
    return {TOKENIZER_CONFIG_FILE: read_text(ground.base, file.name)} if pinned and file.is_file() else {}


def _tensors(partial: Path, ground: Ground, parts: Mapping[str, Part]) -> Iterator[TensorInfo]:
    """Every tensor, by the name and in the shard that it has in the composed folder."""
    shards = [place for place in ground.taken if place.endswith(".safetensors")]
    shards += [
        f"{folder_of(name)}/{file}"
        for name, part in parts.items()
        for file in part.files.sizes
        if file.endswith(".safetensors")
    ]
    for shard in shards:
        yield from read_header(partial, shard).values()


def _check_written(partial: Path, ground: Ground, parts: Mapping[str, Part]) -> None:
    """Refuse a folder in which a loader would find other tensors than those of the base and of the plans."""
    planned = {renamed(own.name, name) for name, part in parts.items() for own in part.manifest.plan.tensors}
    if set(open_checkpoint(partial).tensors) != {*ground.tensors, *planned}:
        raise CheckpointError(
            f"{ground.name}: the files do not hold the tensors of the base and of the plans. Extract the expansions "
            "again."
        )
