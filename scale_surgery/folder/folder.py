"""A model folder with expansions as a value: its headers and its surgery.json, read and checked together."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from scale_surgery.checkpoint.expansions import expansion_of
from scale_surgery.checkpoint.folder import Checkpoint, open_checkpoint
from scale_surgery.checkpoint.forms import refuse_form
from scale_surgery.checkpoint.listing import is_left_link, linked_parts
from scale_surgery.checkpoint.names import CONFIG_FILE, MANIFEST_FILE
from scale_surgery.checkpoint.numbering import CONFIG_KEY, numbering_of
from scale_surgery.checkpoint.sources import Source
from scale_surgery.errors import CheckpointError, Problem
from scale_surgery.folder.config import written_config
from scale_surgery.folder.record import Manifest, check_name, read_manifest


@dataclass(frozen=True)
class Folder(Checkpoint):
    """An expanded folder, in blocks or fused.

    Attributes:
        manifest: The content of its surgery.json.
        whole: The folder with all its expansions, if this is a view of some of them; see `only`.
    """

    manifest: Manifest = field(kw_only=True)
    whole: Folder | None = field(default=None, kw_only=True, compare=False, repr=False)

    @property
    def of_all(self) -> Folder:
        """The folder with all its expansions: this one, or the one of which it is a view."""
        return self.whole or self

    @property
    def base_shards(self) -> list[str]:
        """Shards that are files of the base."""
        stored = {entry.stored_as for entry in self.manifest.base_files.values()}
        return [shard for shard in self.shards if shard in stored]

    def only(self, *names: str) -> Folder:
        """View the folder as if it held some of its expansions alone, without a router over all."""
        others = self.manifest.expansions.keys() - set(names)
        kept = {name: self.manifest.expansions[name] for name in names}
        manifest = replace(self.manifest, expansions=kept, routing=None, verification=None)
        tensors = {name: info for name, info in self.tensors.items() if expansion_of(name) not in others}
        files = {info.file for info in tensors.values()}
        return replace(
            self,
            # what the folder's own says of the others is left out
            config=written_config(manifest, manifest.base_config) if names else self.config,
            tensors=tensors,
            shards=tuple(shard for shard in self.shards if shard in files),
            manifest=manifest,
            whole=self.of_all,
        )

    def one(self, name: str | None = None) -> Folder:
        """View the folder as if it held one expansion: the one of this name, or the only one."""
        check_name(name, self.manifest, self.path)
        return self if len(self.manifest.expansions) == 1 else self.only(name or self.manifest.name)


def open_folder(path: Path) -> Folder:
    """Read an expanded folder: its config, its headers and its surgery.json; no tensor is read.

    Raises:
        CheckpointError: If it is no expanded folder, or its headers and records contradict each other.
    """
    return with_record(open_checkpoint(path))


def open_given(path: Path) -> Checkpoint:
    """Read a base, or a `Folder` if it has a surgery.json."""
    checkpoint = open_checkpoint(path)
    return with_record(checkpoint) if (path / MANIFEST_FILE).is_file() else checkpoint


def named_base(given: Checkpoint, source: Source) -> tuple[str, str | None]:
    """Return name and revision of a base: those that are recorded, or those of the model that was named."""
    if isinstance(given, Folder):
        return given.manifest.base_name, given.manifest.base_revision
    return source.name, source.revision


def with_record(checkpoint: Checkpoint, manifest: Manifest | None = None) -> Folder:
    """Join a checkpoint with its surgery.json, and check that both name the same duplicated layers."""
    manifest = manifest or read_manifest(checkpoint.path)
    headers = {each.name: getattr(checkpoint, each.name) for each in fields(Checkpoint)}
    folder = Folder(**headers, manifest=manifest)
    _check_numbering(folder)
    return folder


def _check_numbering(folder: Folder) -> None:
    """Check that config.json names the same duplicated layers as surgery.json: names of tensors follow from them."""
    numbering, expected = numbering_of(folder.config.get(CONFIG_KEY)), folder.manifest.numbering
    place = f"{folder.path / CONFIG_FILE}: {CONFIG_KEY}"
    if numbering != expected:
        copied, recorded = ([] if each is None else list(each.copied) for each in (numbering, expected))
        raise CheckpointError(Problem("config-copies-differ", place, copied=copied, recorded=recorded))
    if CONFIG_KEY not in folder.config:
        raise CheckpointError(Problem("config-specs-missing", place))


def refuse_fused(folder: Folder) -> None:
    """Refuse a model whose blocks are joined with base tensors."""
    if folder.manifest.fused is not None:
        refuse_form(folder.path, "fused", "expanded")


def refuse_linked(checkpoint: Checkpoint) -> None:
    """Refuse a model whose copy would lack files, because they are links out of its folder; each is named."""
    files = list[str | None]()
    if isinstance(checkpoint, Folder):
        manifest = checkpoint.manifest
        files = [*(entry.stored_as for entry in manifest.base_files.values()), *manifest.code]
    linked = [name for name in files if name is not None and is_left_link(checkpoint.path, name)]
    if names := dict.fromkeys([*linked, *linked_parts(checkpoint.path)]):
        raise CheckpointError(*(Problem("file-is-link", name, folder=checkpoint.path) for name in names))
