"""The base of a composed folder to be: a base model, or that of another composed folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scale_surgery.checkpoint.composed import refuse_lost_record
from scale_surgery.checkpoint.folder import Checkpoint, open_checkpoint, read_text
from scale_surgery.checkpoint.hashes import hash_all
from scale_surgery.checkpoint.names import CONFIG_FILE, INDEX_FILE
from scale_surgery.checkpoint.reading import parse_json
from scale_surgery.checkpoint.sources import Source
from scale_surgery.composition.intact import refuse_damaged
from scale_surgery.composition.record import Composition, is_composition, read_composed_record, read_rest
from scale_surgery.planning.base import fingerprint
from scale_surgery.progress import Track
from scale_surgery.surgery.config import stored_shard
from scale_surgery.surgery.record import BaseFile


@dataclass(frozen=True)
class Ground:
    """A base on which expansions are composed.

    Attributes:
        name: What the user called it.
        base_name: What it is recorded as.
        base_revision: Commit of its Hub repository, where known.
        base: Its config and its tensors, as a checkpoint of its own.
        files: Its files: sha256, size, and the name that each has in a composed folder.
        tensors: sha256 of each of its tensors.
        replaced: Texts of its files that a composed folder replaces.
        left_out: Files of its folder that are not taken along.
        composed: composed.json, where it is the base of a composed folder.
    """

    name: str
    base_name: str
    base_revision: str | None
    base: Checkpoint
    files: Mapping[str, BaseFile]
    tensors: Mapping[str, str]
    replaced: Mapping[str, str]
    left_out: tuple[str, ...]
    composed: Composition | None = None

    @property
    def fingerprint(self) -> str:
        """sha256 over its config and the names, dtypes and shapes of its tensors."""
        return fingerprint(self.base)

    @property
    def taken(self) -> dict[str, Path]:
        """Where each file lies that a composed folder takes over, by the name that it has there."""
        of_base = self.composed is None
        return {
            file.stored_as: self.base.path / (name if of_base else file.stored_as)
            for name, file in self.files.items()
            if file.stored_as is not None
        }


def open_base(source: Source, removed: Sequence[str]) -> tuple[Checkpoint, Composition | None]:
    """Read config and headers of what expansions are composed on; no weight is read.

    Args:
        source: A base model, or a composed folder.
        removed: Expansions of a composed folder that are left out, and not looked at.

    Returns:
        The base as a checkpoint of its own; and composed.json, where it lies in a composed folder.

    Raises:
        CheckpointError: If it cannot be read.
    """
    refuse_lost_record(source.path)
    if not is_composition(source.path):
        return open_checkpoint(source.path), None
    record, (given, _) = read_composed_record(source.path), read_rest(source.path, removed)
    tensors = {name: given.tensors[name] for name in record.base_tensors if name in given.tensors}
    return replace(given, config=parse_json(record.replaced[CONFIG_FILE]), tensors=tensors), record


def base_bytes(base: Checkpoint) -> int:
    """Bytes of the shards of a base."""
    return sum((base.path / shard).stat().st_size for shard in {info.file for info in base.tensors.values()})


def ground_of(source: Source, base: Checkpoint, track: Track) -> Ground:
    """Hash a base model on which expansions are composed.

    Args:
        source: Where it is.
        base: Its config and headers.
        track: Makes progress bars.

    Raises:
        CheckpointError: If it cannot be read.
    """
    names = [*base.shards, *base.side_files]
    sizes = {name: (source.path / name).stat().st_size for name in names}
    with track("base hashes", sum(sizes.values())) as advance:
        sums = hash_all(base, names, advance)
    replaced = {name: read_text(base, name) for name in base.side_files if name in (CONFIG_FILE, INDEX_FILE)}
    places = {name: None if name in replaced else stored_shard(name) for name in names}
    files = {name: BaseFile(sums.files[name], sizes[name], places[name]) for name in names}
    tensors = {name: sums.tensors[name] for name in base.tensors}
    return Ground(source.name, source.name, source.revision, base, files, tensors, replaced, base.left_out)


def ground_in(source: Source, base: Checkpoint, record: Composition, removed: Sequence[str], track: Track) -> Ground:
    """The base of a composed folder, which is checked by its hashes, with all expansions that stay.

    Args:
        source: The composed folder.
        base: Config and headers of the base in it.
        record: Its composed.json.
        removed: Expansions that are left out, and not looked at.
        track: Makes progress bars.

    Raises:
        CheckpointError: If the folder is not what was written.
    """
    refuse_damaged(*read_rest(source.path, removed), track)
    identity = (source.name, record.base_name, record.base_revision)
    return Ground(*identity, base, record.base_files, record.base_tensors, record.replaced, record.left_out, record)
