"""Put an extracted expansion back on its base: the folder that it was taken from, byte for byte.

base files    --as files, compared by hash-->   base files
the extract   --as files, compared by hash-->   everything else

If the base has the same tensors in other files (other shards, another README), the folder is written around these
files, as `compose` writes one, so that `strip` gives them back. If tensors differ, the base is another one, and is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from scale_surgery.checkpoint.files import BaseWeights
from scale_surgery.checkpoint.folder import Checkpoint, open_checkpoint
from scale_surgery.checkpoint.hashes import hash_files
from scale_surgery.checkpoint.sources import Source, find_source
from scale_surgery.checkpoint.staging import check_space, check_target, staged
from scale_surgery.errors import CheckpointError, Problem
from scale_surgery.folder.extract_folder import (
    Extract,
    check_own_files,
    made_files,
    name_in_extract,
    open_extract,
    shards_of,
)
from scale_surgery.folder.folder import refuse_linked
from scale_surgery.folder.layout import Contents, lay_out, needed_bytes, room_for, total_bytes
from scale_surgery.folder.record import Manifest
from scale_surgery.folder.renumbered import stored_shards
from scale_surgery.folder.write import EXTENDED, room_for_base, write_folder
from scale_surgery.planning.base import Base
from scale_surgery.planning.plan import plan_expansion
from scale_surgery.planning.reserved import check_clashes
from scale_surgery.progress import Track, no_track
from scale_surgery.running.new_tokens import check_new_tokens
from scale_surgery.running.options import RunOptions
from scale_surgery.running.tokenizer import load_tokenizer
from scale_surgery.surgery.same_base import check_fit, find_differing, hash_base, refuse_differing


@dataclass(frozen=True)
class ComparedBase:
    """A base model, compared with the one that an expansion was made on.

    Attributes:
        source: Where it is.
        checkpoint: Its config and headers.
        files: sha256 of each of its files.
        other_files: Names of files that are changed, new or missing; its tensors are the recorded ones.
    """

    source: Source
    checkpoint: Checkpoint
    files: Mapping[str, str]
    other_files: tuple[str, ...]


@dataclass(frozen=True)
class GivenBase:
    """The base that an extracted expansion is put on.

    Attributes:
        model: A folder or a Hub id. Default: the Hub repository that the extract names, at its commit.
        revision: Branch, tag or commit of its Hub repository. Default: as the extract names it.
    """

    model: str | Path | None = None
    revision: str | None = None


@dataclass(frozen=True)
class Applied:
    """Result of `apply`.

    Attributes:
        path: The expanded checkpoint.
        base_name: What its base model is called.
        base_revision: Commit of its Hub repository, where known.
        base_tensors: Number of base tensors.
        expansion_tensors: Number of expansion tensors.
        other_files: Files of the base that are other than those it was expanded from: changed, new or missing. Empty
            where the folder is the extracted one, byte for byte.
        foreign_code: Code files that this release did not write.
        bytes_written: Bytes of shards that were written; 0 with hard links.
        left_out: Files that were not taken along: weights in other formats, links that lead out of the base, and files
            of the extract that this base has too, such as a README.md.
    """

    path: Path
    base_name: str
    base_revision: str | None
    base_tensors: int
    expansion_tensors: int
    other_files: tuple[str, ...]
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
        base: The base model, a folder or a Hub id; or a `GivenBase` with its revision. Default: the Hub repository
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
    extracted = open_extract(extract, extract_revision)
    manifest = extracted.manifest
    wanted = base if isinstance(base, GivenBase) else GivenBase(base)
    source = _find_base(extracted, wanted)
    checkpoint, target = open_checkpoint(source.path), Path(output)
    title = source.name if wanted.model is None else str(wanted.model)
    check_fit(extracted, checkpoint, title)
    refuse_linked(checkpoint)
    check_target(target, [extracted.path, source.path], overwrite=overwrite)
    check_own_files(extracted, track)
    compared = _compare_base(extracted, source, checkpoint, title, track)
    # that of the base stays, where both have a file
    twice = [name for name in _brought(extracted) if name in checkpoint.side_files] if compared.other_files else []
    if compared.other_files:
        check_clashes(checkpoint)
    if _has_other_tokenizer(extracted, compared) and (new := manifest.plan.request.new_tokens) is not None:
        check_new_tokens(source.path, load_tokenizer(source.path, run), new, manifest.plan.sizes.embedded, run)
    if compared.other_files:
        expansions = _named(manifest, compared).expansions
        brought = [name for name in _brought(extracted) if name not in twice]
        files: Contents = {name: extracted.path / name_in_extract(name) for name in brought}
        # those of an unfinished training run have other names
        files = {**files, **shards_of(extracted, expansions[manifest.name].plan)}
        room = room_for_base(checkpoint, manifest.plan, target, base_weights)
    else:
        files, room = _put_back(extracted, checkpoint), 0
    check_space(target, room + room_for(files, target, base_weights))
    state = {
        "apply": {name: file.sha256 for name, file in extracted.listing.files.items()},
        "base": [source.name, source.revision, compared.files],
        "base_weights": base_weights,
    }
    base_bytes, shards = 0, {name: content for name, content in files.items() if name.endswith(".safetensors")}
    with staged(target, state, {**extracted.stamps, **checkpoint.stamps}, overwrite=overwrite) as partial:
        with track("files", total_bytes(files)) as advance:
            lay_out(files, partial, base_weights, advance)
        if compared.other_files:
            # the record says where the tensors were computed, as the extract does
            on = replace(run, device=manifest.tool.get("device", "cpu"))
            written = write_folder(checkpoint, expansions, manifest.routing, partial, base_weights, track, on)
            base_bytes = written.base_bytes
        # a loader must find the tensors of the expansion and of the base, and no others
        if set(open_checkpoint(partial).tensors) != {*manifest.base_tensors, *extracted.tensors}:
            raise CheckpointError(Problem("extract-tensors-differ", extracted.name))
    return Applied(
        path=target,
        base_name=source.name if compared.other_files else manifest.base_name,
        base_revision=source.revision if compared.other_files else manifest.base_revision,
        base_tensors=len(checkpoint.tensors),
        expansion_tensors=len(extracted.tensors),
        other_files=compared.other_files,
        foreign_code=() if compared.other_files else manifest.foreign_code,
        bytes_written=base_bytes + needed_bytes(shards, "auto" if base_weights == "link" else "copy"),
        left_out=(*checkpoint.left_out, *twice),
    )


def _find_base(extract: Extract, wanted: GivenBase) -> Source:
    """Find the base that the user named, or the one that the extract names."""
    manifest = extract.manifest
    if wanted.model is not None:
        return find_source(wanted.model, wanted.revision)
    if manifest.base_revision is None:
        raise CheckpointError(Problem("extract-base-unknown", extract.name, base=manifest.base_name))
    return find_source(manifest.base_name, wanted.revision, recorded=manifest.base_revision)


def _compare_base(extract: Extract, source: Source, base: Checkpoint, title: str, track: Track) -> ComparedBase:
    """Hash the files of a base, and refuse it if a tensor is not the recorded one.

    Tensors are read only if a shard is not the recorded file.
    """
    files = [*base.shards, *base.side_files]
    with track("base hashes", sum((base.path / file).stat().st_size for file in files)) as advance:
        hashes = hash_files(base.path, files, advance)
    recorded = {name: file.sha256 for name, file in extract.manifest.base_files.items()}
    others = tuple(sorted(name for name in {*hashes, *recorded} if hashes.get(name) != recorded.get(name)))
    if any(name.endswith(".safetensors") for name in others):
        differing = find_differing(extract, base, hash_base(base, track))
        refuse_differing(extract, title, differing, len(base.tensors), "base-differs-apply")
    return ComparedBase(source, base, hashes, others)


def _put_back(extract: Extract, base: Checkpoint) -> Contents:
    """Return every file where it was."""
    manifest, shards = extract.manifest, stored_shards(base, extract.manifest.numbering)
    names = {file.stored_as: name for name, file in manifest.base_files.items() if file.stored_as is not None}
    places = {stored: shards.get(stored, base.path / names[stored]) for stored in extract.listing.from_base}
    return places | {name: extract.path / name_in_extract(name) for name in extract.listing.files}


def _brought(extract: Extract) -> list[str]:
    """Files beside the tensors that an extract brings to a base with other files; others are made for that base."""
    made = made_files(extract)
    return [name for name in extract.side_files if name not in made]


def _has_other_tokenizer(extract: Extract, base: ComparedBase) -> bool:
    """Return True if new tokens are to be written into another tokenizer than the one they were made for."""
    is_other = not set(base.other_files).isdisjoint(EXTENDED)
    return is_other and extract.manifest.plan.request.new_tokens is not None


def _named(manifest: Manifest, base: ComparedBase) -> Manifest:
    """Return a record that names this base, in its plan too."""
    name, revision, made = base.source.name, base.source.revision, manifest.plan
    plan = plan_expansion(Base(base.checkpoint, made.facts), made.request, name=name, revision=revision)
    return replace(manifest, base_name=name, base_revision=revision).with_expansion(plan=plan)
