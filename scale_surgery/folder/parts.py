"""Read base tensors and blocks of a folder, in blocks or fused, and its base as files."""

from __future__ import annotations

import functools
import hashlib
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery.checkpoint.files import write_json, write_text
from scale_surgery.checkpoint.folder import open_checkpoint, read_json, read_tensor
from scale_surgery.checkpoint.hashes import hash_tensors
from scale_surgery.checkpoint.headers import TensorInfo
from scale_surgery.checkpoint.names import INDEX_FILE, MANIFEST_FILE
from scale_surgery.checkpoint.reading import parse_json
from scale_surgery.checkpoint.shards import Entry, entries_of, tensor_bytes
from scale_surgery.errors import CheckpointError, Problem, problems_of
from scale_surgery.folder.folder import Folder, with_record
from scale_surgery.folder.joining import (
    Joined,
    copied_head,
    joined_tensors,
    renamed_tensors,
    take_piece,
    tied_head,
)
from scale_surgery.folder.layout import Content, Shard
from scale_surgery.folder.record import Manifest
from scale_surgery.folder.renumbered import base_content
from scale_surgery.progress import Progress, no_progress
from scale_surgery.running.options import RunOptions
from scale_surgery.running.tokenizer import need_tokenizer

if TYPE_CHECKING:
    from torch import Tensor


def part_readers(folder: Folder) -> dict[str, Callable[[], Tensor]]:
    """Return a reader of each base tensor and each block of a folder, by name."""
    manifest = folder.manifest
    readers: dict[str, Callable[[], Tensor]] = {
        name: functools.partial(read_tensor, folder, name) for name in folder.tensors
    }
    if manifest.fused is None:
        return readers
    readers |= {name: readers.pop(new) for name, new in renamed_tensors(manifest).items() if new in readers}
    # the pieces of a matrix are asked for one after the other
    read = functools.lru_cache(maxsize=1)(functools.partial(read_tensor, folder))
    head = tied_head(manifest)
    for item in joined_tensors(manifest):
        whole = readers.pop(item.name, None)
        # pieces of a joined tensor that is missing or of a wrong shape have no reader
        if whole is not None and folder.tensors[item.name].shape == item.shape:
            pieces = {name: functools.partial(_take, item, block, read) for block, name in item.pieces.items()}
            # the base's part of a head that was tied goes by the head's name
            readers |= {
                item.name if item == head and name == item.base else name: piece for name, piece in pieces.items()
            }
    if (copy := copied_head(manifest)) and manifest.plan.embedding in readers:
        readers[copy] = readers[manifest.plan.embedding]
    return readers


def described_parts(folder: Folder) -> Mapping[str, TensorInfo]:
    """Return dtype, shape and size of each base tensor and each block of a folder, by name."""
    if folder.manifest.fused is None:
        return folder.tensors
    headers = {shard: parse_json(record["header"]) for shard, record in folder.manifest.joined_shards.items()}
    return {
        name: TensorInfo(name, shard, entry["dtype"], tuple(entry["shape"]), begin, end - begin)
        for shard, header in headers.items()
        for name, entry in header.items()
        if name != "__metadata__"
        for begin, end in [entry["data_offsets"]]
    }


def _take(item: Joined, block: str, read: Callable[[str], Tensor]) -> Tensor:
    return take_piece(item, block, read(item.name))


def hash_parts(folder: Folder, names: Iterable[str], advance: Progress = no_progress) -> dict[str, str]:
    """Hash base tensors and blocks, by name; missing ones are left out."""
    if folder.manifest.fused is None:
        return hash_tensors(folder, [name for name in names if name in folder.tensors], advance)
    hashes, wanted = {}, set(names)
    # the pieces of a matrix follow each other, so that it is read once
    for name, read in part_readers(folder).items():
        if name in wanted:
            content = tensor_bytes(read())
            hashes[name] = hashlib.sha256(content).hexdigest()
            advance(len(content))
    return hashes


def base_contents(path: Path, manifest: Manifest) -> dict[str, Content]:
    """Return what each file of the base model is made of, by its own name."""
    contents: dict[str, Content] = {}
    # of a damaged folder the base's files may be whole, so no more is opened than has to be
    fused = with_record(open_checkpoint(path), manifest) if manifest.joined_shards else None
    for name, file in manifest.base_files.items():
        if file.stored_as is None:
            contents[name] = manifest.replaced[name]
        elif fused is not None and file.stored_as in manifest.joined_shards:
            contents[name] = rebuilt_shard(fused, file.stored_as)
        else:
            contents[name] = base_content(path, manifest, file.stored_as)
    return contents


def link_base(expanded: Folder, folder: Path) -> dict[str, str]:
    """Make a folder of links that loads as the base; no tensor is copied."""
    manifest = expanded.manifest
    for name, file in manifest.base_files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if file.stored_as is None:
            write_text(folder / name, manifest.replaced[name])
        else:
            (folder / name).symlink_to((expanded.path / file.stored_as).resolve())
    numbering = manifest.numbering
    if numbering is None:
        return {}
    index = folder / INDEX_FILE
    if index.is_file():
        content = read_json(index)
        places = {numbering.stored(name): shard for name, shard in content["weight_map"].items()}
        write_json(index, {**content, "weight_map": places})
    # `key_mapping` for `from_pretrained`: shards name tensors by position, these patterns make base names of them
    return numbering.as_key_mapping(manifest.first_plan.sizes.layers)


def base_tokenizer(expanded: Folder, tokenizer: Any, run: RunOptions) -> Any:
    """Return the tokenizer of a folder's base: the folder's own, unless an expansion adds tokens."""
    if not expanded.of_all.manifest.adds_tokens:
        return tokenizer
    with tempfile.TemporaryDirectory() as folder:
        link_base(expanded, Path(folder))
        of_base = need_tokenizer(Path(folder), expanded.manifest.base_name, run)
    # a template that the user gave the folder asks the base too
    if getattr(of_base, "chat_template", None) is None:
        of_base.chat_template = getattr(tokenizer, "chat_template", None)
    # the tokens that end an answer are read where it says that it lies, and the folder is gone
    of_base.name_or_path = str(expanded.path)
    return of_base


def tokenizer_alone(expanded: Folder, run: RunOptions) -> Any:
    """Return the tokenizer of an expansion alone: the base's, if another expansion of the folder adds tokens."""
    tokenizer = need_tokenizer(expanded.path, expanded.path.name, run)
    return tokenizer if expanded.manifest.adds_tokens else base_tokenizer(expanded, tokenizer, run)


def rebuilt_shard(folder: Folder, shard: str) -> Shard:
    """Return a shard of a fused model as it was before its tensors were joined."""
    text = folder.manifest.joined_shards[shard]["header"].encode("utf-8")
    header = len(text).to_bytes(8, "little") + text
    unfit = functools.partial(Problem, "fused-header-unfit", MANIFEST_FILE, shard=shard, folder=folder.path)
    readers = {name: _bytes_reader(tensor) for name, tensor in part_readers(folder).items()}
    try:
        entries = tuple(entries_of(header, readers))
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(unfit(*problems_of(error))) from error
    return Shard(header, tuple(replace(entry, read=functools.partial(_read_whole, entry, unfit)) for entry in entries))


def _read_whole(entry: Entry, unfit: Callable[..., Problem]) -> list[bytes | memoryview]:
    """Read the bytes of a tensor; those of a joined one may be fewer than the recorded header says."""
    pieces = list(entry.read())
    if (found := sum(map(len, pieces))) != entry.size:
        raise CheckpointError(unfit(Problem("tensor-bytes", entry.name, written=found, needed=entry.size)))
    return pieces


def _bytes_reader(read: Callable[[], Tensor]) -> Callable[[], Iterable[memoryview]]:
    return lambda: [tensor_bytes(read())]
