"""Execute a plan: a base checkpoint and a plan become an expanded checkpoint beside it.

base shards   --as files-->        model-*.safetensors       (same bytes; above a duplicated layer under other names)
plan          --tensor by tensor-> expansion-*.safetensors   (new tensors only)
config.json   --edited-->          config.json, *.py         (own model_type, own classes)
everything else --as files-->      everything else
                                   model.safetensors.index.json, surgery.json   (last)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path

from scale_surgery import modeling
from scale_surgery.checkpoint.files import BaseWeights, take_over, write_json, write_tensors, write_text
from scale_surgery.checkpoint.folder import Checkpoint, open_checkpoint, read_text
from scale_surgery.checkpoint.hashes import FileHash, Sums, hash_all, hash_tensors, tensors_by_file
from scale_surgery.checkpoint.headers import TensorInfo
from scale_surgery.checkpoint.names import CONFIG_FILE, INDEX_FILE, MANIFEST_FILE
from scale_surgery.checkpoint.numbering import Numbering
from scale_surgery.checkpoint.sources import Source, find_source
from scale_surgery.checkpoint.staging import check_space, check_target, staged
from scale_surgery.deriving.planned import make_plan
from scale_surgery.errors import CheckpointError
from scale_surgery.planning.plan import Plan, check_fits
from scale_surgery.planning.request import Request
from scale_surgery.progress import Progress, Track, no_track
from scale_surgery.running.loading import load_base_config
from scale_surgery.running.options import RunOptions
from scale_surgery.surgery import record as manifests
from scale_surgery.surgery.config import expanded_config, planned_index, stored_shard
from scale_surgery.surgery.record import BaseFile, Manifest
from scale_surgery.surgery.renumbered import hash_stored, renumbered_shards, write_renumbered


@dataclass(frozen=True)
class Expansion:
    """What `expand` did.

    Attributes:
        path: The expanded checkpoint.
        plan: The plan that was executed.
        base_bytes_written: Bytes of base shards that were written; 0 with hard links.
        left_out: Base files that were not taken along: weights in another format, links that lead out of its folder.
        pinned_tokenizer: The tokenizer class that tokenizer_config.json now names, where it had to.
    """

    path: Path
    plan: Plan
    base_bytes_written: int
    left_out: tuple[str, ...]
    pinned_tokenizer: str | None


def default_output(plan: Plan) -> Path:
    """Where an expanded model goes when nothing is said: `<name>-<method>` in the current folder."""
    return Path(f"{plan.base_name.rsplit('/', 1)[-1]}-{plan.method.name}")


def expand(
    model: str | Path,
    plan_or_request: Plan | Request,
    output: str | Path | None = None,
    *,
    revision: str | None = None,
    base_weights: BaseWeights = "auto",
    overwrite: bool = False,
    run: RunOptions = RunOptions(),
    track: Track = no_track,
) -> Expansion:
    """Widen chosen layers of a checkpoint; every base tensor keeps its bytes.

    Args:
        model: A folder or a Hub id.
        plan_or_request: What is to be done, or what is asked for.
        output: Folder to be; default `<name>-scale` in the current folder, or `-grow` or `-depth`.
        revision: Branch, tag or commit of a Hub repository; a plan brings its own.
        base_weights: How base files are taken over: "auto", "copy" or "link".
        overwrite: Whether an existing output folder may be replaced.
        run: Where the decompositions are computed, and how the base's tokenizer is loaded: device, trust_remote_code.
        track: Makes progress bars.

    Returns:
        What was done.

    Raises:
        PlanError: If the plan or the request does not fit the model.
        CheckpointError: If the model cannot be read or the output cannot be written.
    """
    planned = None if isinstance(plan_or_request, Request) else plan_or_request
    # a branch of the Hub may have moved since the plan was made: its commit is what was planned
    source = find_source(model, (planned.base_revision if planned else None) or revision)
    checkpoint = open_checkpoint(source.path)
    made, run = _plan_for(source, checkpoint, plan_or_request, run), run.placed()
    target = Path(output) if output is not None else default_output(made)
    check_target(target, [source.path], overwrite=overwrite)
    _check_clashes(checkpoint, made)
    load_base_config(source.path, source.name, run)  # what transformers refuses is known before anything is written
    check_space(target, _needed_bytes(checkpoint, made, base_weights))
    state = {
        "plan": made.to_json(),
        "base_weights": base_weights,
        # tensors of two devices are not mixed
        "tool": _tool(run),
    }
    with staged(target, state, checkpoint.stamps, overwrite=overwrite) as partial:
        write_expansion(made, checkpoint, partial, run.device, track)
        written, sums = _take_over_base(made, checkpoint, partial, base_weights, track)
        pinned = _write_code_and_config(made, checkpoint, partial, run)
        _write_index_and_manifest(made, checkpoint, partial, _tool(run), sums, track)
    return Expansion(target, made, written, checkpoint.left_out, pinned)


def _tool(run: RunOptions) -> dict[str, str]:
    """What makes the new tensors: the same on the same device gives the same bytes."""
    return manifests.tool_versions() | {"device": run.device}


def _plan_for(source: Source, checkpoint: Checkpoint, plan_or_request: Plan | Request, run: RunOptions) -> Plan:
    if isinstance(plan_or_request, Request):
        return make_plan(checkpoint, plan_or_request, name=source.name, revision=source.revision)
    check_fits(plan_or_request, checkpoint)
    # surgery.json names the model that was read, not one of the same shapes elsewhere
    return replace(plan_or_request, base_name=source.name, base_revision=source.revision)


def _needed_bytes(checkpoint: Checkpoint, plan: Plan, base_weights: BaseWeights) -> int:
    # a reflink takes no space either, but whether it works is only known when it is tried
    copied = checkpoint.shards if base_weights == "copy" else renumbered_shards(checkpoint, plan.numbering)
    return sum((checkpoint.path / shard).stat().st_size for shard in copied) + plan.costs.bytes_added


def _check_clashes(checkpoint: Checkpoint, plan: Plan) -> None:
    ours = {*plan.code_files, *plan.shards}
    names = [tensor.name for tensor in plan.tensors if tensor.name in checkpoint.tensors]
    problems = [f"{name}: the base model has a tensor of this name already." for name in names]
    clashing = sorted(ours.intersection([*checkpoint.side_files, *checkpoint.shards]))
    problems += [f"{file}: the base model has a file of this name, which the expansion needs." for file in clashing]
    if problems:
        raise CheckpointError.from_problems(problems)


def write_expansion(plan: Plan, checkpoint: Checkpoint, partial: Path, device: str, track: Track) -> None:
    """Write the shards of new tensors; one that is there already, from an interrupted run, stays.

    Args:
        plan: What to write.
        checkpoint: The base.
        partial: Where the shards go.
        device: Where the decompositions are computed.
        track: Makes progress bars.
    """
    from scale_surgery.surgery.initialise import make_tensor

    with track("new tensors", plan.costs.parameters_added) as advance:
        for shard in plan.shards:
            planned = [tensor for tensor in plan.tensors if tensor.shard == shard]
            if not (partial / shard).exists():
                tensors = {}
                for tensor in planned:
                    stored = plan.stored_name(tensor.name)
                    tensors[stored] = make_tensor(plan, tensor, checkpoint, device)
                    advance(tensor.elements)
                write_tensors(partial / shard, tensors)
            else:
                advance(sum(tensor.elements for tensor in planned))


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
    from scale_surgery.surgery.initialise import TORCH_DTYPES

    for file in plan.code_files:
        write_text(partial / file, modeling.code_text(file))
    dtype = str(TORCH_DTYPES[checkpoint.running_dtype]).removeprefix("torch.")
    write_json(partial / CONFIG_FILE, expanded_config(checkpoint.config, plan, dtype))
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
        code={file: modeling.code_hash(file) for file in plan.code_files},
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
