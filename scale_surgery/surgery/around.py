"""All of an expanded folder but its new tensors: the base's files, code and config, index and record.

base shards     --as files-->  model-*.safetensors       (same bytes; above a duplicated layer under other names)
config.json     --edited-->    config.json, *.py         (own model_type, own classes)
everything else --as files-->  everything else
                               model.safetensors.index.json, surgery.json   (last)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path

from scale_surgery.checkpoint.files import BaseWeights, take_over, write_json, write_text
from scale_surgery.checkpoint.folder import Checkpoint, open_checkpoint, read_text
from scale_surgery.checkpoint.hashes import FileHash, Sums, hash_all, hash_tensors, tensors_by_file
from scale_surgery.checkpoint.headers import TensorInfo
from scale_surgery.checkpoint.names import CONFIG_FILE, INDEX_FILE, MANIFEST_FILE, TRAINING_FOLDER
from scale_surgery.checkpoint.numbering import Numbering
from scale_surgery.planning.plan import Plan
from scale_surgery.progress import Progress, Track
from scale_surgery.running.options import RunOptions
from scale_surgery.surgery import record as manifests
from scale_surgery.surgery.config import (
    code_texts,
    expanded_config,
    hash_texts,
    make_index,
    planned_index,
    stored_shard,
)
from scale_surgery.surgery.record import BaseFile, Manifest
from scale_surgery.surgery.renumbered import hash_stored, renumbered_shards, write_renumbered


def tool_on(run: RunOptions) -> dict[str, str]:
    """What makes the new tensors: the same on the same device gives the same bytes."""
    return manifests.tool_versions() | {"device": run.device}


def running_dtype(checkpoint: Checkpoint) -> str:
    """Torch's name of the dtype in which a base computes, for a config that names none."""
    from scale_surgery.surgery.initialise import TORCH_DTYPES

    return str(TORCH_DTYPES[checkpoint.running_dtype]).removeprefix("torch.")


def write_around(
    plan: Plan, checkpoint: Checkpoint, partial: Path, base_weights: BaseWeights, run: RunOptions, track: Track
) -> tuple[int, str | None]:
    """Write all of an expanded folder but the shards of new tensors, which are there already.

    Args:
        plan: What was written.
        checkpoint: The base.
        partial: The folder.
        base_weights: How base files are taken over.
        run: The device of the new tensors, and how the base's tokenizer is loaded.
        track: Makes progress bars.

    Returns:
        Bytes of base shards that were written, and the tokenizer class that was pinned, if any.
    """
    written, sums = _take_over_base(plan, checkpoint, partial, base_weights, track)
    pinned = _write_code_and_config(plan, checkpoint, partial, run)
    _write_index_and_manifest(plan, checkpoint, partial, tool_on(run), sums, track)
    return written, pinned


def _take_over_base(
    plan: Plan, checkpoint: Checkpoint, partial: Path, how: BaseWeights, track: Track
) -> tuple[int, Sums]:
    """Take base files over; gives the bytes of shards that were written, and the sums of those that were copied."""
    sums = Sums()
    sizes = {shard: (checkpoint.path / shard).stat().st_size for shard in checkpoint.shards}
    with track("base shards", sum(sizes.values())) as advance:
        renumbered = take_over_shards(checkpoint, partial, plan.numbering, how, advance, sums)
    for file in checkpoint.side_files:
        if file not in (CONFIG_FILE, INDEX_FILE):
            # small, and a program may edit them in place: always copies
            take_over(checkpoint.path / file, partial / file, "copy")
    return sum(size for shard, size in sizes.items() if how != "link" or shard in renumbered), sums


def take_over_shards(
    checkpoint: Checkpoint,
    folder: Path,
    numbering: Numbering | None,
    how: BaseWeights,
    advance: Progress,
    sums: Sums | None = None,
) -> Mapping[str, str]:
    """Take the shards of a base over as files; those in which tensors get other names, with another header.

    Args:
        checkpoint: The base.
        folder: Where they go.
        numbering: Where its layers stand among copies; None where no layer is duplicated.
        how: How files are taken over.
        advance: Called with the bytes done.
        sums: Gets the sums of the shards that are copied, which are hashed as they are.

    Returns:
        The header that the base has of each shard in which tensors get other names.
    """
    renumbered, held = renumbered_shards(checkpoint, numbering), tensors_by_file(checkpoint)
    for shard in checkpoint.shards:
        source, file = checkpoint.path / shard, folder / stored_shard(shard)
        if numbering is not None and shard in renumbered:
            write_renumbered(source, file, numbering, advance)
        else:
            _take_over_shard(source, file, how, held[shard], sums, advance)
    return renumbered


def _take_over_shard(
    source: Path, file: Path, how: BaseWeights, held: Sequence[TensorInfo], sums: Sums | None, advance: Progress
) -> None:
    found = FileHash(held)

    def pass_by(block: memoryview) -> None:
        if sums is not None:
            found.update(block)
        advance(len(block))

    if not take_over(source, file, how, pass_by):
        advance(source.stat().st_size)
    elif sums is not None:
        found.add_to(sums, file.name)


def _write_code_and_config(plan: Plan, checkpoint: Checkpoint, partial: Path, run: RunOptions) -> str | None:
    from scale_surgery.running.tokenizer import pin_tokenizer_class

    for file, text in code_texts(plan).items():
        write_text(partial / file, text)
    write_json(partial / CONFIG_FILE, expanded_config(checkpoint.config, plan, running_dtype(checkpoint)))
    return pin_tokenizer_class(checkpoint.path, partial, run)


def _write_index_and_manifest(
    plan: Plan, checkpoint: Checkpoint, partial: Path, tool: Mapping[str, str], sums: Sums, track: Track
) -> None:
    write_json(partial / INDEX_FILE, planned_index(plan, checkpoint))
    expanded = open_checkpoint(partial)
    write_json(partial / MANIFEST_FILE, asdict(_make_manifest(plan, checkpoint, expanded, tool, sums, track)))


def _make_manifest(
    plan: Plan, checkpoint: Checkpoint, expanded: Checkpoint, tool: Mapping[str, str], sums: Sums, track: Track
) -> Manifest:
    replaced = {
        file: read_text(checkpoint, file)
        for file in checkpoint.side_files
        if file in (CONFIG_FILE, INDEX_FILE) or not _is_same_file(checkpoint.path / file, expanded.path / file)
    }
    renumbered = renumbered_shards(checkpoint, plan.numbering)
    manifest = Manifest(
        base_name=plan.base_name,
        base_revision=plan.base_revision,
        base_fingerprint=plan.base_fingerprint,
        base_files={},
        base_tensors={},
        left_out=checkpoint.left_out,
        replaced=replaced,
        expansion_tensors=hash_tensors(expanded, [tensor.name for tensor in plan.tensors]),
        code=hash_texts(code_texts(plan)),
        plan=plan,
        tool=tool,
        renumbered={stored_shard(shard): header for shard, header in renumbered.items()},
    )
    return _with_base_hashes(manifest, checkpoint, expanded, sums, track)


def _with_base_hashes(
    manifest: Manifest, checkpoint: Checkpoint, expanded: Checkpoint, copied: Sums, track: Track
) -> Manifest:
    """Hash the base as it was written: what is recorded is what `strip` gives back, whatever becomes of the base.

    Args:
        manifest: Without the hashes.
        checkpoint: The base.
        expanded: What was written.
        copied: Sums of the shards that were hashed as they were copied; all else is read again.
        track: Makes progress bars.

    Returns:
        The manifest with the hashes.
    """
    places = {file: stored_shard(file) for file in (*checkpoint.shards, *checkpoint.side_files)}
    taken = {file: stored for file, stored in places.items() if file not in manifest.replaced}
    sizes = {file: checkpoint.stamps[checkpoint.path / file].bytes for file in places}
    left = {file: place for file, place in taken.items() if place not in copied.files}
    # the file of a renumbered shard is hashed with the base's header, and its tensors by themselves
    moved = [place for place in left.values() if place in manifest.renumbered]
    beside = [name for name in checkpoint.tensors if expanded.tensors[name].file in moved]
    total = sum(sizes[file] for file in left) + sum(expanded.tensors[name].bytes for name in beside)
    with track("base hashes", total) as advance:
        read = hash_all(expanded, [place for place in left.values() if place not in moved], advance)
        stored = copied.files | read.files | hash_stored(expanded.path, manifest, moved, advance)
        tensors = copied.tensors | read.tensors | hash_tensors(expanded, beside, advance)
    hashes = {file: stored[place] for file, place in taken.items()}
    hashes |= {file: sha256(text.encode("utf-8")).hexdigest() for file, text in manifest.replaced.items()}
    files = {file: BaseFile(hashes[file], sizes[file], taken.get(file)) for file in places}
    return replace(manifest, base_files=files, base_tensors={name: tensors[name] for name in checkpoint.tensors})


def _is_same_file(one: Path, other: Path) -> bool:
    return one.stat().st_size == other.stat().st_size and one.read_bytes() == other.read_bytes()


def take_over_around(checkpoint: Checkpoint, manifest: Manifest, partial: Path, how: BaseWeights, track: Track) -> int:
    """Take over all of an expanded folder but its new tensors and its records; the index lists those of its plan.

    Args:
        checkpoint: The expanded folder.
        manifest: Its surgery.json.
        partial: The folder to fill.
        how: How base shards are taken over.
        track: Makes progress bars.

    Returns:
        Bytes of base shards that were written.
    """
    path, plan = checkpoint.path, manifest.plan
    shards, total = base_shards(checkpoint, manifest), sum(info.bytes for info in checkpoint.tensors.values())
    others = [
        file for file in checkpoint.side_files if file != INDEX_FILE and not file.startswith(f"{TRAINING_FOLDER}/")
    ]
    sizes = {file: (path / file).stat().st_size for file in (*shards, *others)}
    with track("files", sum(sizes.values())) as advance:
        for file, size in sizes.items():
            take_over(path / file, partial / file, how if file in shards else "copy")
            advance(size)
    places = {name: checkpoint.tensors[name].file for name in manifest.base_tensors}
    places |= {tensor.name: tensor.shard for tensor in plan.tensors}
    write_json(partial / INDEX_FILE, make_index(places, plan.specs, total))
    return 0 if how == "link" else sum(sizes[shard] for shard in shards)


def base_shards(checkpoint: Checkpoint, manifest: Manifest) -> list[str]:
    """Shards of an expanded folder that are the base's."""
    stored = {entry.stored_as for entry in manifest.base_files.values()}
    return [shard for shard in checkpoint.shards if shard in stored]
