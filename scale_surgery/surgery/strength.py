"""Write an expanded folder whose expansion has a strength: W12 and the head's new columns are scaled.

Files of the base, code, config and tokenizer stay as they are; shards with scaled tensors and surgery.json are new.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from scale_surgery.checkpoint.expansions import tensor_name
from scale_surgery.checkpoint.files import BaseWeights
from scale_surgery.checkpoint.folder import open_checkpoint, read_tensor
from scale_surgery.checkpoint.hashes import hash_tensors
from scale_surgery.checkpoint.shards import entries_of, header_bytes, stored, tensor_bytes
from scale_surgery.checkpoint.staging import check_space
from scale_surgery.errors import PlanError
from scale_surgery.folder.check import refuse_damaged
from scale_surgery.folder.folder import Folder
from scale_surgery.folder.layout import Content, Shard, lay_out, room_for, total_bytes
from scale_surgery.folder.record import ExpansionRecord
from scale_surgery.folder.write import write_record
from scale_surgery.planning.plan import Plan
from scale_surgery.progress import Track
from scale_surgery.running.strength import scaled, strength_problems

HOW: BaseWeights = "auto"


def check_scalable(folder: Folder) -> None:
    """Refuse an expansion that has no strength between its base's and its own."""
    plan = folder.manifest.plan
    if problems := strength_problems(plan.variant, plan.widths.new_tokens, "--strength"):
        raise PlanError(*problems)


def write_scaled(folder: Folder, target: Path, strength: float, track: Track, *, is_trusted: bool = False) -> None:
    """Write an expanded folder of one expansion into a new folder, at a strength.

    surgery.json records the strength and the hashes of the scaled tensors, so the folder is whole like any other.
    """
    # scaled tensors get hashes of their own, which would vouch for damage
    refuse_damaged(folder, track, is_trusted=is_trusted)
    record = folder.manifest.expansions[folder.manifest.name]
    names = writing_tensors(record.plan)
    shards = {folder.tensors[name].file for name in names}
    contents: dict[str, Content] = {file: folder.path / file for file in (*folder.shards, *folder.side_files)}
    contents |= {shard: _scaled_shard(folder, shard, names, strength) for shard in shards}
    check_space(target, room_for(contents, target, HOW))
    target.mkdir()
    with track("scaled tensors", total_bytes(contents)) as advance:
        lay_out(contents, target, HOW, advance)
    written = hash_tensors(open_checkpoint(target), names)
    manifest = folder.manifest.with_expansion(strength=record.strength * strength, trained=_trained(record, written))
    write_record(target, replace(manifest, verification=None))


def writing_tensors(plan: Plan) -> list[str]:
    """List the tensors of an expansion that write into the base stream or the logits."""
    of_head = tensor_name(plan.head, plan.request.name, "up_weight")
    return [tensor.name for tensor in plan.tensors if tensor.block == "w12" or tensor.name == of_head]


def _trained(record: ExpansionRecord, written: dict[str, str]) -> dict[str, str] | None:
    """Return the hashes of tensors that differ from their initial values; None if no training run has ended."""
    if record.trained is None:
        return None
    now = {**record.trained, **written}
    return {name: digest for name, digest in now.items() if digest != record.tensors[name]}


def _scaled_shard(folder: Folder, shard: str, names: Iterable[str], strength: float) -> Shard:
    header = header_bytes(folder.path / shard)
    readers: dict[str, Callable[[], Iterable[bytes | memoryview]]] = {
        name: stored(folder, name).read for name, info in folder.tensors.items() if info.file == shard
    }
    readers |= {name: functools.partial(_read_scaled, folder, name, strength) for name in names if name in readers}
    return Shard(header, tuple(entries_of(header, readers)))


def _read_scaled(folder: Folder, name: str, strength: float) -> list[memoryview]:
    return [tensor_bytes(scaled(read_tensor(folder, name), strength))]
