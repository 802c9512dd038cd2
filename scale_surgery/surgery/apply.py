"""Put an extracted expansion back on its base: the folder that it was taken from, byte for byte.

base files    --as files, compared by hash-->   base files
the extract   --as files, compared by hash-->   everything else

Where the base has the same tensors in other files (other shards, another README), the folder is made anew around
these files: see `rebase`. Where tensors differ the base is another one, and is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scale_surgery.checkpoint.files import BaseWeights, take_over
from scale_surgery.checkpoint.folder import Checkpoint, open_checkpoint
from scale_surgery.checkpoint.hashes import hash_files
from scale_surgery.checkpoint.sources import Source, find_source
from scale_surgery.checkpoint.staging import check_space, check_target, staged
from scale_surgery.errors import CheckpointError
from scale_surgery.progress import Track, no_track
from scale_surgery.running.options import RunOptions
from scale_surgery.surgery.extract_folder import Extract, check_own_files, name_in_extract, open_extract
from scale_surgery.surgery.rebase import ComparedBase, check_names, rebase
from scale_surgery.surgery.renumbered import numbering_in, renumbered_shards, write_renumbered
from scale_surgery.surgery.same_base import check_fit, find_differing, hash_base, refuse_differing

ADVICE = "Give that base; or --force, and no promise but recoverable is made."


@dataclass(frozen=True)
class GivenBase:
    """The base that an extracted expansion is put on.

    Attributes:
        model: A folder or a Hub id. Default: the Hub repository that the extract names, at its commit.
        revision: Branch, tag or commit of its Hub repository. Default: as the extract names it.
        force: Accept a base whose tensors differ. It is recorded, and no promise but recoverable is made.
    """

    model: str | Path | None = None
    revision: str | None = None
    force: bool = False


@dataclass(frozen=True)
class Applied:
    """What `apply` did.

    Attributes:
        path: The expanded checkpoint.
        base_name: What its base model is called.
        base_revision: Commit of its Hub repository, where known.
        base_tensors: Number of base tensors.
        expansion_tensors: Number of expansion tensors.
        other_files: Files of the base that are other than those it was expanded from: changed, new or missing. Empty
            where the folder is the extracted one, byte for byte.
        differing: Base tensors that differ from those it was expanded from; there are some with `force` alone.
        foreign_code: Code files that no release of this program wrote.
        bytes_written: Bytes of shards that were written; 0 with hard links.
        left_out: Files of the base that were not taken along: weights in other formats, links that lead out of it.
    """

    path: Path
    base_name: str
    base_revision: str | None
    base_tensors: int
    expansion_tensors: int
    other_files: tuple[str, ...]
    differing: tuple[str, ...]
    foreign_code: tuple[str, ...]
    bytes_written: int
    left_out: tuple[str, ...]


def apply(
    extract: str | Path,
    output: str | Path,
    base: str | Path | GivenBase | None = None,
    *,
    extract_revision: str | None = None,
    base_weights: BaseWeights = "auto",
    overwrite: bool = False,
    run: RunOptions = RunOptions(),
    track: Track = no_track,
) -> Applied:
    """Write the expanded checkpoint that an extract was taken from.

    Args:
        extract: A folder that `extract` wrote, or a Hub id.
        output: Folder to be.
        base: The base model, a folder or a Hub id; or a `GivenBase` that says more of it. Default: the Hub repository
            that the extract names, at its commit.
        extract_revision: Branch, tag or commit of the extract's Hub repository.
        base_weights: How shards are taken over: "auto", "copy" or "link".
        overwrite: Whether an existing output folder may be replaced.
        run: How the base's tokenizer is loaded: trust_remote_code.
        track: Makes progress bars.

    Returns:
        What was done.

    Raises:
        CheckpointError: If this is no extract, a tensor of the base is not the recorded one (all of them are
            counted, the first are named), or the output cannot be written.
        PlanError: If the base is of another architecture.
    """
    found = open_extract(extract, extract_revision)
    wanted = base if isinstance(base, GivenBase) else GivenBase(base)
    source = find_base(found, wanted.model, wanted.revision)
    given, target = open_checkpoint(source.path), Path(output)
    title = source.name if wanted.model is None else str(wanted.model)
    check_fit(found, given, title)
    check_target(target, [found.path, source.path], overwrite=overwrite)
    check_own_files(found, track)
    read = _read_base(found, source, given, track)
    if not wanted.force:
        refuse_differing(found, title, read.differing, len(given.tensors), ADVICE)
    if read.other_files:
        check_names(found, read)
    written = _bytes_written(found, given, base_weights)
    check_space(target, written if base_weights == "copy" or found.manifest.renumbered else 0)
    state = {
        "apply": {name: file.sha256 for name, file in found.files.items()},
        "base": [source.name, source.revision, read.files],
        "base_weights": base_weights,
    }
    with staged(target, state, {**found.stamps, **given.stamps}, overwrite=overwrite) as partial:
        if read.other_files:
            rebase(found, read, partial, base_weights, run, track)
        else:
            _rebuild(found, given, partial, base_weights, track)
        _check_written(found, partial)
    return Applied(
        path=target,
        base_name=source.name if read.other_files else found.manifest.base_name,
        base_revision=source.revision if read.other_files else found.manifest.base_revision,
        base_tensors=len(given.tensors),
        expansion_tensors=len(found.tensors),
        other_files=read.other_files,
        differing=tuple(read.differing),
        foreign_code=found.manifest.foreign_code,
        bytes_written=written,
        left_out=given.left_out,
    )


def _read_base(extract: Extract, source: Source, base: Checkpoint, track: Track) -> ComparedBase:
    """Hash a base and compare it with the recorded one; tensors whose shards are the recorded files are not read."""
    files = [*base.shards, *base.side_files]
    with track("base hashes", sum((base.path / file).stat().st_size for file in files)) as advance:
        hashes = hash_files(base.path, files, advance)
    recorded = {name: file.sha256 for name, file in extract.manifest.base_files.items()}
    others = tuple(sorted(name for name in {*hashes, *recorded} if hashes.get(name) != recorded.get(name)))
    has_other_shards = any(name.endswith(".safetensors") for name in others)
    tensors = hash_base(base, track) if has_other_shards else extract.manifest.base_hashes
    return ComparedBase(source, base, hashes, tensors, find_differing(extract, base, tensors), others)


def find_base(extract: Extract, base: str | Path | None, revision: str | None) -> Source:
    """Find the base that the user named, or the one that an extract names.

    Args:
        extract: The extract.
        base: A folder or a Hub id, or None.
        revision: Branch, tag or commit of a Hub repository.

    Returns:
        Where it is.

    Raises:
        CheckpointError: If it cannot be had, or nobody names it.
    """
    manifest = extract.manifest
    if base is None and manifest.base_revision is None:
        raise CheckpointError(
            f"{extract.name}: was made on a folder called {manifest.base_name}, which cannot be looked up, expected a "
            "Hub repository. Give the base: --base MODEL."
        )
    if base is None:
        return find_source(manifest.base_name, revision or manifest.base_revision)
    return find_source(base, revision)


def _bytes_written(extract: Extract, base: Checkpoint, how: BaseWeights) -> int:
    own = sum(file.bytes for name, file in extract.files.items() if name.endswith(".safetensors"))
    renumbered = renumbered_shards(base, extract.manifest.plan.numbering)
    written = renumbered if how == "link" else base.shards
    return (0 if how == "link" else own) + sum((base.path / shard).stat().st_size for shard in written)


def _rebuild(extract: Extract, base: Checkpoint, partial: Path, how: BaseWeights, track: Track) -> None:
    """Put every file where it was."""
    manifest = extract.manifest
    names = {file.stored_as: name for name, file in manifest.base_files.items() if file.stored_as is not None}
    places = {stored: base.path / names[stored] for stored in extract.from_base}
    places |= {name: extract.path / name_in_extract(name) for name in extract.files}
    with track("files", sum(file.stat().st_size for file in places.values())) as advance:
        for name, file in places.items():
            if name in manifest.renumbered:
                write_renumbered(file, partial / name, numbering_in(manifest), advance)
                continue
            take_over(file, partial / name, how, advance)


def _check_written(extract: Extract, partial: Path) -> None:
    """Refuse a folder in which a loader would find other tensors than the expansion's and the base's."""
    written = set(open_checkpoint(partial).tensors)
    if written != {*extract.manifest.base_tensors, *extract.tensors}:
        raise CheckpointError(
            f"{extract.name}: its files and its index do not make the model that its surgery.json describes. "
            "Download the extract again."
        )
