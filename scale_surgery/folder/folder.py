"""An expanded folder as if it held some of its expansions alone: the others, and a router over all, are left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from scale_surgery.checkpoint.expansions import expansion_of
from scale_surgery.checkpoint.folder import Checkpoint, open_checkpoint
from scale_surgery.checkpoint.names import CONFIG_FILE
from scale_surgery.checkpoint.reading import parse_json
from scale_surgery.folder.config import written_config
from scale_surgery.folder.record import Manifest, ManifestView, check_name, read_manifest


def open_expansion(path: Path, name: str | None = None) -> tuple[Checkpoint, Manifest]:
    """Read an expanded folder and its surgery.json as if it held one expansion."""
    checkpoint, manifest = open_checkpoint(path), read_manifest(path)
    check_name(name, manifest, path)
    if len(manifest.expansions) == 1:
        return checkpoint, manifest
    return only(checkpoint, manifest, name or manifest.name)


def only(checkpoint: Checkpoint, manifest: Manifest, *names: str) -> tuple[Checkpoint, ManifestView]:
    """A folder and its record as if it held some of its expansions alone."""
    view = view_of(manifest, *names)
    tensors = {name: info for name, info in checkpoint.tensors.items() if expansion_of(name) in (None, *names)}
    files = {info.file for info in tensors.values()}
    return replace(
        checkpoint,
        # what the folder's own says of the others is left out
        config=written_config(view, parse_json(manifest.replaced[CONFIG_FILE])),
        tensors=tensors,
        shards=tuple(shard for shard in checkpoint.shards if shard in files),
    ), view


def view_of(manifest: Manifest, *names: str) -> ManifestView:
    """A record as if the folder held some of its expansions alone."""
    expansions = {name: manifest.expansions[name] for name in names}
    alone = {"expansions": expansions, "routing": None, "verification": None, "whole": manifest.of_folder}
    return ManifestView(**{**vars(manifest), **alone})
