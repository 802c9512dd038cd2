"""The fused form on disk: each linear of an expanded layer is one matrix; and back, every file byte for byte.

base shards, expansion shards  --joined tensor by tensor-->  fused-*.safetensors
config.json                    --edited-->                   scale_surgery.fused: true
surgery.json                   headers and texts of what was there, from which each file is written again

Joining copies, so the bytes of every base tensor and of every block lie in the fused shards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery.checkpoint.expansions import INFIX
from scale_surgery.checkpoint.files import as_json
from scale_surgery.checkpoint.folder import open_checkpoint, read_tensor, read_text
from scale_surgery.checkpoint.hashes import hash_files, hash_tensors
from scale_surgery.checkpoint.names import CONFIG_FILE, INDEX_FILE, MANIFEST_FILE
from scale_surgery.checkpoint.shards import (
    Entry,
    computed,
    header_bytes,
    stored,
)
from scale_surgery.errors import CheckpointError, PlanError, Problem
from scale_surgery.folder.config import code_texts, fused_config
from scale_surgery.folder.folder import Folder
from scale_surgery.folder.joining import (
    cast_problems,
    copied_head,
    fork_of,
    gram_of,
    gram_size,
    head_of,
    join_pieces,
    joined_tensors,
    renamed_tensors,
)
from scale_surgery.folder.layout import Content, Shard, lay_out, make_index, tensors_in, total_bytes
from scale_surgery.folder.parts import rebuilt_shard
from scale_surgery.folder.record import Manifest
from scale_surgery.modeling.expanded_routers import CosineRouter
from scale_surgery.planning.stock import fused_problems
from scale_surgery.progress import Track

if TYPE_CHECKING:
    from torch import Tensor


# rows of a head that stand in memory in float32 at a time
ROWS_AT_ONCE = 2**13


def check_fusible(folder: Folder) -> None:
    """Check that the blocks of every linear can be joined without a cast."""
    manifest = folder.manifest
    problems = fused_problems(manifest.plan.architecture, manifest.plan.layers)
    problems += _router_problems(manifest)
    problems += cast_problems(folder.tensors, manifest)
    problems += manifest.plan.method.refusal("fuse", "--to fused")
    if problems:
        raise PlanError(*problems)


def _router_problems(manifest: Manifest) -> list[Problem]:
    """Return the reasons why a routed model has no fused form."""
    routing = manifest.routing
    if isinstance(routing, CosineRouter) and routing.strict and manifest.plan.widths.new_tokens:
        return [Problem("fused-router-and-tokens", "--to fused")]
    if routing is None or isinstance(routing, CosineRouter):
        return []
    return [Problem("fused-router", "--to fused", router=routing.router)]


def write_fused(folder: Folder, partial: Path, track: Track) -> dict[str, Any]:
    """Write the shards, the index, config.json and the code of a model's fused form."""
    manifest = folder.manifest
    # the files of the model were compared with its surgery.json
    code = code_texts(manifest.plan, is_fused=True)
    before = {file: read_text(folder, file) for file in (INDEX_FILE, CONFIG_FILE, *manifest.code, MANIFEST_FILE)}
    remembered = _shards_of(folder, track)
    shards = fused_shards(folder)
    with track("fused shards", total_bytes(shards)) as advance:
        lay_out(shards, partial, "copy", advance)
    index = make_index(tensors_in(partial, shards))
    texts = {
        INDEX_FILE: as_json(index),
        CONFIG_FILE: as_json(fused_config(folder.config, manifest)),
        **code,
    }
    lay_out(texts, partial)
    gram = [name for name in index["weight_map"] if name == gram_of(manifest.plan)]
    # what surgery.json has to remember so that the files can be written again
    return {
        "made": hash_tensors(open_checkpoint(partial), gram),
        "shards": remembered,
        "texts": {file: text for file, text in before.items() if file in manifest.code or texts.get(file) != text},
    }


def fused_shards(folder: Folder) -> dict[str, Content]:
    """Return the content of each shard of the fused form: kept tensors, and joined ones in the place of their parts."""
    manifest = folder.manifest
    tensors, renamed = folder.tensors, renamed_tensors(manifest)
    # a head that was tied, but is no more, stands where its up part was
    joined = {
        item.name if item.name in tensors else item.pieces.get("up_weight", item.base): item
        for item in joined_tensors(manifest)
    }
    inside = {name for item in joined.values() for name in item.pieces.values() if INFIX in name}
    copy = copied_head(manifest)
    read = functools.partial(read_tensor, folder)
    kept: dict[str, list[Entry]] = {shard: [] for shard in folder.shards}
    for name, info in tensors.items():
        if name in joined:
            item = joined[name]
            make = functools.partial(join_pieces, item, read)
            kept[info.file].append(computed(item.name, tensors[item.base].dtype, item.shape, make))
        elif name not in inside and name != copy:
            kept[info.file].append(replace(stored(folder, name), name=renamed.get(name, name)))
    filled = [entries for entries in kept.values() if entries]
    if fork_of(manifest) is not None:
        size = gram_size(manifest)
        filled[-1].append(computed(gram_of(manifest.plan), "F32", (size, size), lambda: _make_gram(manifest, read)))
    numbered = enumerate(map(Shard.of, filled), 1)
    return {f"fused-{number:05d}-of-{len(filled):05d}.safetensors": shard for number, shard in numbered}


def _make_gram(manifest: Manifest, read: Callable[[str], Tensor]) -> Tensor:
    """Compute G = [W b]'[W b] of the base's head: it turns a cosine of logits into one of features."""
    import torch

    name, bias = head_of(manifest)
    whole, added = read(name), None if bias is None else read(bias)
    if new := manifest.plan.widths.new_tokens:
        blocks = [tensor for tensor in manifest.plan.tensors if tensor.block == "new_rows"]
        # of a head that is not tied it is the last
        whole = torch.cat((whole, read(blocks[-1].name)))
        added = None if added is None else torch.nn.functional.pad(added, (0, new))
    size = gram_size(manifest)
    gram = torch.zeros(size, size, dtype=torch.float64)
    # a head can be larger than all else, and in float32 twice as large again
    for start in range(0, len(whole), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        weight = whole[rows].float()
        if added is not None:
            weight = torch.cat((weight, added[rows].float()[:, None]), dim=1)
        gram += weight.t() @ weight
    return gram.float()


def _shards_of(folder: Folder, track: Track) -> dict[str, dict[str, str]]:
    """Return header and sha256 of each shard; the hashes of base shards are the recorded ones, already checked."""
    known = {file.stored_as: file.sha256 for file in folder.manifest.base_files.values()}
    new_shards = [shard for shard in folder.shards if shard not in known]
    with track("hashes", sum((folder.path / shard).stat().st_size for shard in new_shards)) as advance:
        hashes = hash_files(folder.path, new_shards, advance)
    headers = {shard: header_bytes(folder.path / shard)[8:].decode("utf-8") for shard in folder.shards}
    return {shard: {"header": header, "sha256": hashes.get(shard) or known[shard]} for shard, header in headers.items()}


def write_blocks(folder: Folder, partial: Path, track: Track) -> None:
    """Write each file that `write_fused` replaced, and check each shard by its hash."""
    manifest = folder.manifest
    assert manifest.fused is not None
    shards: dict[str, Content] = {shard: rebuilt_shard(folder, shard) for shard in manifest.joined_shards}
    # each byte is written, and read again to be hashed
    with track("shards", 2 * total_bytes(shards)) as advance:
        lay_out(shards, partial, "copy", advance)
        digests = hash_files(partial, list(shards), advance)
    problems = []
    for shard, record in manifest.joined_shards.items():
        if digests[shard] != record["sha256"]:
            problems.append(Problem("fused-shard-changed", shard, digest=digests[shard], recorded=record["sha256"]))
            (partial / shard).unlink()
    if problems:
        raise CheckpointError(*problems)
    lay_out(manifest.fused["texts"], partial)
