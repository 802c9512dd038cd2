"""The fused form on disk: each linear of an expanded layer is one matrix; and back, every file byte for byte.

base shards, expansion shards  --joined tensor by tensor-->  fused-*.safetensors
config.json                    --edited-->                   scale_surgery.fused: true
surgery.json                   headers and texts of what was there, from which each file is written again

Joining copies, so the bytes of every base tensor and of every block lie in the fused shards.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery import modeling
from scale_surgery.checkpoint import (
    CONFIG_FILE,
    INDEX_FILE,
    MANIFEST_FILE,
    Checkpoint,
    TensorInfo,
    read_tensor,
    read_text,
)
from scale_surgery.errors import CheckpointError, PlanError
from scale_surgery.expand import expanded_config
from scale_surgery.families import get_family
from scale_surgery.joining import Joined, cast_problems, has_joined_head, join, joined_tensors, take
from scale_surgery.manifest import Manifest, hash_file, hash_files, hash_tensors
from scale_surgery.methods import method_of
from scale_surgery.progress import Progress, Track, no_progress
from scale_surgery.route import routed_config
from scale_surgery.shards import (
    Entry,
    computed,
    entries_of,
    header_bytes,
    stored,
    tensor_bytes,
    write_pieces,
    write_shard,
)
from scale_surgery.staging import as_json, write_text

if TYPE_CHECKING:
    from torch import Tensor


def check_fusible(checkpoint: Checkpoint, manifest: Manifest) -> None:
    """Check that the blocks of every linear can be joined without a cast.

    Raises:
        PlanError: If not; every tensor of another dtype than its base tensor is named. Or if the model is grown.
    """
    problems = cast_problems(checkpoint, manifest)
    if method_of(manifest.plan) == "grow":
        problems.append(
            "--to fused: the model is grown, and the base product of its down projections counts a share, so that one "
            "matrix would hold other bytes than the base's. Merge --to stock: a plain checkpoint with a larger MLP."
        )
    if problems:
        raise PlanError.from_problems(problems)


def fused_config(config: Mapping[str, Any], manifest: Manifest) -> dict[str, Any]:
    """Edit an expanded model's config.json: its linears are joined, and its head where that can be."""
    fused = {"fused": True, "fused_head": has_joined_head(manifest)}
    return {**config, "scale_surgery": {**config["scale_surgery"], **fused}}


def written_config(manifest: Manifest, base: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """What config.json of an expanded model says on a base: expanded, routed and fused as surgery.json has it.

    Args:
        manifest: surgery.json.
        base: Parsed config.json of the base.
        dtype: Dtype of the base, for a config that names none.
    """
    written = expanded_config(base, manifest.plan["specs"], get_family(manifest.plan["family"]), dtype)
    if manifest.routing is not None:
        written = routed_config(written, manifest)
    return written if manifest.fused is None else fused_config(written, manifest)


def config_problems(manifest: Manifest, config: Mapping[str, Any]) -> list[str]:
    """Keys of config.json that are not what was written, a line each."""
    written = written_config(manifest, json.loads(manifest.replaced[CONFIG_FILE]), config.get("torch_dtype", ""))
    differing = sorted(key for key in {*written, *config} if written.get(key) != config.get(key))
    return [f"{CONFIG_FILE}: {key} is not what the expansion wrote." for key in differing]


def write_fused(checkpoint: Checkpoint, manifest: Manifest, folder: Path, track: Track) -> dict[str, Any]:
    """Write the shards, the index, config.json and the code of a model's fused form.

    Args:
        checkpoint: The expanded model.
        manifest: Its surgery.json.
        folder: Where they go; shards that are there already, from an interrupted run, stay.
        track: Makes progress bars.

    Returns:
        What surgery.json has to remember so that the files can be written again.

    Raises:
        CheckpointError: If a base shard is not what it was, or a text cannot be read.
    """
    code = {file: modeling.code_text(file) for file in get_family(manifest.plan["family"]).code_files}
    before = {file: read_text(checkpoint, file) for file in (INDEX_FILE, CONFIG_FILE, *code, MANIFEST_FILE)}
    remembered = _shards_of(checkpoint, manifest, track)
    shards = fused_shards(checkpoint, manifest)
    total = sum(entry.bytes for entries in shards.values() for entry in entries)
    with track("fused shards", total) as advance:
        for shard, entries in shards.items():
            if (folder / shard).exists():
                advance(sum(entry.bytes for entry in entries))
            else:
                write_shard(folder / shard, entries, advance)
    weight_map = {entry.name: shard for shard, entries in shards.items() for entry in entries}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    texts = {
        INDEX_FILE: as_json(index),
        CONFIG_FILE: as_json(fused_config(checkpoint.config, manifest)),
        **code,
    }
    for file, text in texts.items():
        write_text(folder / file, text)
    return {
        "shards": remembered,
        "texts": {file: text for file, text in before.items() if texts.get(file) != text},
    }


def fused_shards(checkpoint: Checkpoint, manifest: Manifest) -> dict[str, list[Entry]]:
    """What each shard of the fused form holds: of each shard the tensors that stay, with the joined ones in place."""
    joined = {item.name: item for item in joined_tensors(manifest)}
    gone = {name for item in joined.values() for name in item.pieces.values()} - set(joined)
    read = functools.partial(read_tensor, checkpoint)
    kept: dict[str, list[Entry]] = {shard: [] for shard in checkpoint.shards}
    for name, info in checkpoint.tensors.items():
        if name in joined:
            item = joined[name]
            kept[info.file].append(computed(name, info.dtype, item.shape, functools.partial(join, item, read)))
        elif name not in gone:
            kept[info.file].append(stored(checkpoint, name))
    filled = [entries for entries in kept.values() if entries]
    return {f"fused-{i:05d}-of-{len(filled):05d}.safetensors": entries for i, entries in enumerate(filled, 1)}


def _shards_of(checkpoint: Checkpoint, manifest: Manifest, track: Track) -> dict[str, dict[str, str]]:
    """Header and sha256 of every shard; a base shard that was changed could never be given back."""
    known = {file.stored_as: file.sha256 for file in manifest.base_files.values()}
    with track("hashes", sum((checkpoint.path / shard).stat().st_size for shard in checkpoint.shards)) as advance:
        hashes = hash_files(checkpoint.path, list(checkpoint.shards), advance)
    changed = [
        f"{shard}: sha256 {digest}, expected {known[shard]} from surgery.json. The base inside {checkpoint.path} was "
        "changed after the expansion: restore the file."
        for shard, digest in hashes.items()
        if known.get(shard, digest) != digest
    ]
    if changed:
        raise CheckpointError.from_problems(changed)
    headers = {shard: header_bytes(checkpoint.path / shard)[8:].decode("utf-8") for shard in checkpoint.shards}
    return {shard: {"header": header, "sha256": hashes[shard]} for shard, header in headers.items()}


def part_readers(checkpoint: Checkpoint, manifest: Manifest) -> dict[str, Callable[[], Tensor]]:
    """How to read every base tensor and every block of an expanded model, fused or not, by name.

    Args:
        checkpoint: The model.
        manifest: Its surgery.json.

    Returns:
        The readers; what lies in a joined tensor that is missing or of a wrong shape has none.
    """
    found: dict[str, Callable[[], Tensor]] = {
        name: functools.partial(read_tensor, checkpoint, name) for name in checkpoint.tensors
    }
    # the pieces of a matrix are asked for one after the other
    read = functools.lru_cache(maxsize=1)(functools.partial(read_tensor, checkpoint))
    for item in joined_tensors(manifest) if manifest.fused is not None else ():
        whole = found.pop(item.name, None)
        if whole is not None and checkpoint.tensors[item.name].shape == item.shape:
            found |= {name: functools.partial(_take, item, block, read) for block, name in item.pieces.items()}
    return found


def described_parts(checkpoint: Checkpoint, manifest: Manifest) -> Mapping[str, TensorInfo]:
    """Dtype, shape and size of every base tensor and block of an expanded model, fused or not, by name.

    Args:
        checkpoint: The model.
        manifest: Its surgery.json; of a fused model it says what lay where before.
    """
    if manifest.fused is None:
        return checkpoint.tensors
    headers = {shard: json.loads(record["header"]) for shard, record in manifest.joined_shards.items()}
    return {
        name: TensorInfo(name, shard, entry["dtype"], tuple(entry["shape"]), begin, end - begin)
        for shard, header in headers.items()
        for name, entry in header.items()
        if name != "__metadata__"
        for begin, end in [entry["data_offsets"]]
    }


def _take(item: Joined, block: str, read: Callable[[str], Tensor]) -> Tensor:
    return take(item, block, read(item.name))


def hash_parts(
    checkpoint: Checkpoint, manifest: Manifest, names: Iterable[str], advance: Progress = no_progress
) -> dict[str, str]:
    """sha256 of the bytes of base tensors and blocks, by name; of those that are there."""
    if manifest.fused is None:
        return hash_tensors(checkpoint, [name for name in names if name in checkpoint.tensors], advance)
    readers, hashes = part_readers(checkpoint, manifest), {}
    for name in names:
        if name in readers:
            found = tensor_bytes(readers[name]())
            hashes[name] = hashlib.sha256(found).hexdigest()
            advance(len(found))
    return hashes


def rebuild_shard(
    checkpoint: Checkpoint, manifest: Manifest, shard: str, file: Path, advance: Progress = no_progress
) -> None:
    """Write a shard again as it was before its tensors were joined.

    Args:
        checkpoint: The fused model.
        manifest: Its surgery.json.
        shard: Name that the shard had.
        file: The file to be.
        advance: Called with the bytes done.

    Raises:
        CheckpointError: If surgery.json does not say what the shard held.
    """
    text = manifest.joined_shards[shard]["header"].encode("utf-8")
    header = len(text).to_bytes(8, "little") + text
    read = {name: _bytes_reader(tensor) for name, tensor in part_readers(checkpoint, manifest).items()}
    try:
        write_pieces(file, header, entries_of(header, read), advance)
    except (CheckpointError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{MANIFEST_FILE}: its header of {shard} does not fit the tensors in {checkpoint.path} ({error}). "
            "Restore both from where you got them."
        ) from error


def _bytes_reader(read: Callable[[], Tensor]) -> Callable[[], Iterable[bytes]]:
    return lambda: [tensor_bytes(read())]


def write_blocks(checkpoint: Checkpoint, manifest: Manifest, folder: Path, track: Track) -> None:
    """Write every file that `write_fused` made another of, and check each shard by its hash.

    Args:
        checkpoint: The fused model.
        manifest: Its surgery.json.
        folder: Where they go.
        track: Makes progress bars.

    Raises:
        CheckpointError: If a shard does not come out as it was, because the fused one was changed.
    """
    assert manifest.fused is not None
    problems = []
    # each byte is written, and read again to be hashed
    with track("shards", 2 * sum(info.bytes for info in described_parts(checkpoint, manifest).values())) as advance:
        for shard, record in manifest.joined_shards.items():
            rebuild_shard(checkpoint, manifest, shard, folder / shard, advance)
            if (found := hash_file(folder / shard, advance)) != record["sha256"]:
                problems.append(
                    f"{shard}: sha256 {found}, expected {record['sha256']} from surgery.json. The fused shards were "
                    "changed after the merge: the blocks cannot be given back from this folder."
                )
                (folder / shard).unlink()
    if problems:
        raise CheckpointError.from_problems(problems)
    for file, text in manifest.fused["texts"].items():
        write_text(folder / file, text)
