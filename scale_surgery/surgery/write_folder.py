"""All of an expanded folder but its new tensors: the base's files, code and config, index and record.

base shards     --as files-->  model-*.safetensors       (same bytes; above a duplicated layer under other names)
config.json     --edited-->    config.json, *.py         (own model_type, own classes)
everything else --as files-->  everything else
                               model.safetensors.index.json, surgery.json   (last)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from scale_surgery.checkpoint.expansions import expansion_of
from scale_surgery.checkpoint.files import BaseWeights, take_over, write_json, write_text
from scale_surgery.checkpoint.folder import Checkpoint, open_checkpoint, read_text
from scale_surgery.checkpoint.hashes import hash_all, hash_tensors
from scale_surgery.checkpoint.names import CONFIG_FILE, INDEX_FILE, MANIFEST_FILE, TRAINING_FOLDER
from scale_surgery.checkpoint.numbering import Numbering
from scale_surgery.checkpoint.reading import parse_json
from scale_surgery.modeling.expanded_routers import Router
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
    written_config,
)
from scale_surgery.surgery.record import BaseFile, ExpansionRecord, Manifest, base_tensors
from scale_surgery.surgery.renumbered import hash_stored, renumbered_shards, write_renumbered


def tool_on(run: RunOptions) -> dict[str, str]:
    """What makes the new tensors: the same on the same device gives the same bytes."""
    return manifests.tool_versions() | {"device": run.device}


def running_dtype(checkpoint: Checkpoint) -> str:
    """Torch's name of the dtype in which a base computes, for a config that names none."""
    from scale_surgery.surgery.initialise import TORCH_DTYPES

    return str(TORCH_DTYPES[checkpoint.running_dtype]).removeprefix("torch.")


def write_around(
    expansions: Mapping[str, ExpansionRecord],
    checkpoint: Checkpoint,
    partial: Path,
    base_weights: BaseWeights,
    run: RunOptions,
    track: Track,
    routing: Router | None = None,
) -> tuple[int, str | None]:
    """Write all of an expanded folder but the shards of its expansions, which are there already.

    Args:
        expansions: What surgery.json is to say of each; one of which no sum is known is hashed as it lies there.
        checkpoint: The base.
        partial: The folder.
        base_weights: How base files are taken over.
        run: The device of the new tensors, and how the base's tokenizer is loaded.
        track: Makes progress bars.
        routing: How it routes, or None.

    Returns:
        Bytes of base shards that were written, and the tokenizer class that was pinned, if any.
    """
    plans = [expansion.plan for expansion in expansions.values()]
    written = _take_over_base(plans[0], checkpoint, partial, base_weights, track)
    pinned = _write_code_and_config(plans, checkpoint, partial, run, routing)
    write_json(partial / INDEX_FILE, planned_index(plans, checkpoint))
    expanded = open_checkpoint(partial)
    manifest = _make_manifest(_hashed(expansions, partial), checkpoint, expanded, tool_on(run), routing)
    write_json(partial / MANIFEST_FILE, _with_base_hashes(manifest, checkpoint, expanded, track).to_json())
    return written, pinned


def _hashed(expansions: Mapping[str, ExpansionRecord], folder: Path) -> dict[str, ExpansionRecord]:
    """The same with sums of the tensors of those of which none is known: they lie in the folder as they begin."""
    found, written = dict(expansions), open_checkpoint(folder)
    for name, own in expansions.items():
        if not own.tensors:
            names = [tensor.name for tensor in own.plan.tensors]
            found[name] = replace(own, tensors=hash_tensors(written, names))
    return found


def _take_over_base(plan: Plan, checkpoint: Checkpoint, partial: Path, how: BaseWeights, track: Track) -> int:
    """Take base files over; gives the bytes of shards that were written."""
    sizes = {shard: (checkpoint.path / shard).stat().st_size for shard in checkpoint.shards}
    with track("base shards", sum(sizes.values())) as advance:
        renumbered = take_over_shards(checkpoint, partial, plan.numbering, how, advance)
    for file in checkpoint.side_files:
        if file not in (CONFIG_FILE, INDEX_FILE):
            # small, and a program may edit them in place: always copies
            take_over(checkpoint.path / file, partial / file, "copy")
    return sum(size for shard, size in sizes.items() if how != "link" or shard in renumbered)


def take_over_shards(
    checkpoint: Checkpoint,
    folder: Path,
    numbering: Numbering | None,
    how: BaseWeights,
    advance: Progress,
) -> Mapping[str, str]:
    """Take the shards of a base over as files; those in which tensors get other names, with another header.

    Args:
        checkpoint: The base.
        folder: Where they go.
        numbering: Where its layers stand among copies; None where no layer is duplicated.
        how: How files are taken over.
        advance: Called with the bytes done.

    Returns:
        The header that the base has of each shard in which tensors get other names.
    """
    renumbered = renumbered_shards(checkpoint, numbering)
    for shard in checkpoint.shards:
        source, file = checkpoint.path / shard, folder / stored_shard(shard)
        if numbering is not None and shard in renumbered:
            write_renumbered(source, file, numbering, advance)
        else:
            take_over(source, file, how, advance)
    return renumbered


def _write_code_and_config(
    plans: Sequence[Plan], checkpoint: Checkpoint, partial: Path, run: RunOptions, routing: Router | None
) -> str | None:
    from scale_surgery.running.tokenizer import pin_tokenizer_class

    for file, text in code_texts(plans[0]).items():
        write_text(partial / file, text)
    write_json(partial / CONFIG_FILE, expanded_config(checkpoint.config, plans, running_dtype(checkpoint), routing))
    return pin_tokenizer_class(checkpoint.path, partial, run)


def _make_manifest(
    expansions: Mapping[str, ExpansionRecord],
    checkpoint: Checkpoint,
    expanded: Checkpoint,
    tool: Mapping[str, str],
    routing: Router | None,
) -> Manifest:
    """surgery.json without the hashes of the base."""
    replaced = {
        file: read_text(checkpoint, file)
        for file in checkpoint.side_files
        if file in (CONFIG_FILE, INDEX_FILE) or not _is_same_file(checkpoint.path / file, expanded.path / file)
    }
    facts = next(iter(expansions.values())).plan
    renumbered = renumbered_shards(checkpoint, facts.numbering)
    return Manifest(
        base_name=facts.base_name,
        base_revision=facts.base_revision,
        base_files={},
        base_tensors={},
        left_out=checkpoint.left_out,
        replaced=replaced,
        code=hash_texts(code_texts(facts)),
        expansions=expansions,
        tool=tool,
        routing=routing,
        renumbered={stored_shard(shard): header for shard, header in renumbered.items()},
    )


def _with_base_hashes(manifest: Manifest, checkpoint: Checkpoint, expanded: Checkpoint, track: Track) -> Manifest:
    """Hash the base as it was written: what is recorded is what `strip` gives back, whatever becomes of the base."""
    places = {file: stored_shard(file) for file in (*checkpoint.shards, *checkpoint.side_files)}
    taken = {file: stored for file, stored in places.items() if file not in manifest.replaced}
    sizes = {file: checkpoint.stamps[checkpoint.path / file].bytes for file in places}
    # the file of a renumbered shard is hashed with the base's header, and its tensors by themselves
    moved = [place for place in taken.values() if place in manifest.renumbered]
    beside = [name for name in checkpoint.tensors if expanded.tensors[name].file in moved]
    total = sum(sizes[file] for file in taken) + sum(expanded.tensors[name].bytes for name in beside)
    with track("base hashes", total) as advance:
        read = hash_all(expanded, [place for place in taken.values() if place not in moved], advance)
        stored = read.files | hash_stored(expanded.path, manifest, moved, advance)
        tensors = read.tensors | hash_tensors(expanded, beside, advance)
    hashes = {file: stored[place] for file, place in taken.items()}
    hashes |= {file: sha256(text.encode("utf-8")).hexdigest() for file, text in manifest.replaced.items()}
    files = {file: BaseFile(hashes[file], sizes[file], taken.get(file)) for file in places}
    return replace(manifest, base_files=files, base_tensors=base_tensors(checkpoint, tensors))


def _is_same_file(one: Path, other: Path) -> bool:
    return one.stat().st_size == other.stat().st_size and one.read_bytes() == other.read_bytes()


def write_anew(
    checkpoint: Checkpoint, manifest: Manifest, written: Collection[str], partial: Path, how: BaseWeights, track: Track
) -> int:
    """Write all of an expanded folder with other expansions than it had: only their shards need be there already.

    Args:
        checkpoint: The folder as it is.
        manifest: What its surgery.json is to be.
        written: Names of the expansions whose shards lie in the new folder; those of the others are taken over.
        partial: The new folder.
        how: How shards are taken over.
        track: Makes progress bars.

    Returns:
        Bytes of shards of the base that were written.
    """
    path, kept = checkpoint.path, [name for name in manifest.expansions if name not in written]
    places = {name: info for name, info in checkpoint.tensors.items() if expansion_of(name) in (None, *kept)}
    if manifest.numbering is not None:
        places = {name: checkpoint.tensors[name] for name in manifest.base_tensors}
    shards = dict.fromkeys(info.file for info in places.values())
    texts = (CONFIG_FILE, INDEX_FILE)
    others = [
        file for file in checkpoint.side_files if file not in texts and not file.startswith(f"{TRAINING_FOLDER}/")
    ]
    sizes = {file: (path / file).stat().st_size for file in (*shards, *others)}
    with track("files", sum(sizes.values())) as advance:
        for file in sizes:
            take_over(path / file, partial / file, how if file in shards else "copy", advance)
    new = [tensor for name in written for tensor in manifest.expansions[name].plan.tensors]
    index = {name: info.file for name, info in places.items()} | {tensor.name: tensor.shard for tensor in new}
    total = sum(info.bytes for info in places.values()) + sum(
        manifest.expansions[name].plan.costs.bytes_added for name in written
    )
    base = parse_json(manifest.replaced[CONFIG_FILE])
    write_json(partial / CONFIG_FILE, written_config(manifest, base, checkpoint.config.get("torch_dtype", "")))
    write_json(partial / INDEX_FILE, make_index(index, manifest.first_plan.specs, total))
    write_json(partial / MANIFEST_FILE, replace(manifest, expansions=_hashed(manifest.expansions, partial)).to_json())
    return 0 if how == "link" else sum(sizes[shard] for shard in base_shards(checkpoint, manifest))


def base_shards(checkpoint: Checkpoint, manifest: Manifest) -> list[str]:
    """Shards of an expanded folder that are the base's."""
    stored = {entry.stored_as for entry in manifest.base_files.values()}
    return [shard for shard in checkpoint.shards if shard in stored]
