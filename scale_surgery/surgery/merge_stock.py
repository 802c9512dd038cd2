"""The stock form on disk: a plain checkpoint of the base's own architecture, for programs that run no other code.

base shards      --joined and padded tensor by tensor-->   the same shards, the same names
config.json      the base's own, with the new number of heads and inner width
everything else  the base's own files
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery.checkpoint.files import write_json
from scale_surgery.checkpoint.folder import Checkpoint, read_tensor
from scale_surgery.checkpoint.names import CONFIG_FILE, INDEX_FILE
from scale_surgery.checkpoint.shards import Entry, computed, stored
from scale_surgery.errors import PlanError, Problem
from scale_surgery.folder.folder import Folder
from scale_surgery.folder.joining import Joined, cast_problems, join_pieces, joined_tensors
from scale_surgery.folder.layout import Content, Shard, lay_out, total_bytes
from scale_surgery.folder.record import Manifest
from scale_surgery.folder.write import extended_texts
from scale_surgery.planning.architecture import CONFIG_KEYS, Architecture, Sizes
from scale_surgery.planning.specs import Widths, linear_widths
from scale_surgery.planning.stock import (
    linear_streams,
    stock_problems,
    stock_shapes,
    stock_sizes,
)
from scale_surgery.progress import Track, no_track

if TYPE_CHECKING:
    from torch import Tensor


def check_stock(folder: Folder) -> None:
    """Check that an expanded model has a stock form, and give every reason if it has none."""
    manifest = folder.manifest
    problems = [Problem("stock-router", "--to stock", router=manifest.routing.router)] if manifest.routing else []
    problems += stock_problems(*_facts(manifest), has_gates=manifest.plan.has_gates)
    if problems := [*problems, *cast_problems(folder.tensors, manifest)]:
        raise PlanError(*problems)


def _facts(manifest: Manifest) -> tuple[Architecture, Sizes, Widths]:
    plan = manifest.plan
    return plan.architecture, plan.sizes, plan.widths


def write_stock(folder: Folder, partial: Path, track: Track = no_track) -> None:
    """Write the stock form of an expanded model: every file of the base, under its name, in its shards."""
    manifest = folder.manifest
    # `check_stock` has found nothing wrong with the model
    shards = stock_shards(folder)
    contents: dict[str, Content] = {}
    for name, file in manifest.base_files.items():
        stored_as = file.stored_as or ""
        contents[name] = manifest.replaced.get(name) or _shard(folder, stored_as, shards.get(stored_as, []))
    with track("stock shards", total_bytes(contents)) as advance:
        lay_out(contents, partial, "auto", advance)
    lay_out(extended_texts(partial, [manifest.plan]), partial)
    write_json(partial / CONFIG_FILE, stock_config(manifest.base_config, *_facts(manifest)))
    if INDEX_FILE in manifest.base_files:
        index = json.loads(manifest.replaced[INDEX_FILE])
        write_json(partial / INDEX_FILE, index | {"metadata": _index_metadata(index.get("metadata"), shards)})


def stock_shards(folder: Folder) -> dict[str, list[Entry]]:
    """Return the tensors of each base shard in the stock form, by the shard's name in the expanded folder."""
    manifest = folder.manifest
    shapes = stock_shapes(*_facts(manifest), manifest.base_tensors, manifest.plan.head)
    joined = {item.name: item for item in joined_tensors(manifest)}
    shards: dict[str, list[Entry]] = {}
    for name in manifest.base_tensors:
        info = folder.tensors[name]
        entry = stored(folder, name)
        if name in shapes:
            make = functools.partial(_make, folder, name, joined.get(name))
            entry = computed(name, info.dtype, shapes[name], make)
        shards.setdefault(info.file, []).append(entry)
    return shards


def _make(folder: Folder, name: str, joined: Joined | None) -> Tensor:
    """Make a larger tensor: base values, new values if its layer is expanded, then zeros."""
    read = functools.partial(read_tensor, folder)
    architecture, sizes, widths = _facts(folder.manifest)
    match = architecture.find_linear(name.rpartition(".")[0])
    if match is None:
        # embedding and head, in which nothing is padded
        assert joined is not None, name
        return join_pieces(joined, read)
    block, linear = match
    before = linear_widths(block, linear, widths if joined else Widths())
    after = linear_streams(linear, stock_sizes(architecture, sizes, widths))
    tensor = join_pieces(joined, read) if joined else read(name)
    rows = [(sum(smaller), sum(larger)) for smaller, larger in zip(before.outputs, after.outputs, strict=True)]
    is_transposed = architecture.transposed and tensor.dim() == 2
    padded = pad_with_zeros(tensor.t() if is_transposed else tensor, rows, sum(after.inputs))
    return padded.t() if is_transposed else padded


def pad_with_zeros(tensor: Tensor, rows: Sequence[tuple[int, int]], columns: int) -> Tensor:
    """Pad a weight (outputs, inputs) or a bias (outputs,) with zeros, which follow the values of each section."""
    import torch
    from torch.nn.functional import pad as pad_end

    # `rows` are outputs of each section before and after, `columns` are inputs after
    parts = torch.split(tensor, [before for before, _ in rows])
    beside = [0, columns - tensor.shape[1]] if tensor.dim() == 2 else []
    return torch.cat(
        [pad_end(part, [*beside, 0, after - len(part)]) for part, (_, after) in zip(parts, rows, strict=True)]
    )


def _shard(checkpoint: Checkpoint, file: str, entries: Sequence[Entry]) -> Content:
    """Return what a file of the base is made of in the stock form: other tensors if one of them grows."""
    grows = any(entry.shape != checkpoint.tensors[entry.name].shape for entry in entries)
    return Shard.of(entries) if grows else checkpoint.path / file


def stock_config(config: Mapping[str, Any], architecture: Architecture, sizes: Sizes, widths: Widths) -> dict[str, Any]:
    """Edit a base model's config.json: the heads and the inner width of the stock form, all else as it was."""
    # the head size stands in it where heads were added, since it no longer follows from them
    heads = ("query_heads", "key_value_heads", "head_size") if widths.up_kv_heads else ()
    inner = ("inner",) if widths.up_inner_width else ()
    vocabulary = ("vocabulary",) if widths.new_tokens else ()
    stock, names = stock_sizes(architecture, sizes, widths), (*heads, *inner, *vocabulary)
    values = {architecture.keys.get(name, CONFIG_KEYS[name]): getattr(stock, name) for name in names}
    text = config.get("text_config")
    return {**config, **({"text_config": {**text, **values}} if isinstance(text, Mapping) else values)}


def _index_metadata(metadata: Any, shards: Mapping[str, list[Entry]]) -> dict[str, Any]:
    entries = [entry for shard in shards.values() for entry in shard]
    counts = {
        "total_parameters": sum(prod(entry.shape) for entry in entries),
        "total_size": sum(entry.size for entry in entries),
    }
    fields = dict(metadata) if isinstance(metadata, Mapping) else {}
    return fields | {name: count for name, count in counts.items() if name in fields or name == "total_size"}
