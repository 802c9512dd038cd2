"""Give an expanded checkpoint a router, take it away again, or set its numbers: one key of config.json.

weights, tokenizer, *.py   --as files-->  the same
config.json                --edited-->    scale_surgery.router: which, and its numbers
surgery.json               --edited-->    the same; a verification stays, and names the router that it is about
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from scale_surgery.checkpoint.expansions import ROUTER_KEY
from scale_surgery.checkpoint.files import BaseWeights, write_text
from scale_surgery.checkpoint.folder import read_text
from scale_surgery.checkpoint.names import CONFIG_FILE
from scale_surgery.checkpoint.numbering import CONFIG_KEY
from scale_surgery.checkpoint.staging import check_space, check_target, staged
from scale_surgery.errors import CheckpointError, PlanError, Problem
from scale_surgery.folder.check import refuse_damaged
from scale_surgery.folder.config import path_problems_of, with_router
from scale_surgery.folder.folder import Folder, open_folder, refuse_fused, refuse_linked
from scale_surgery.folder.layout import bytes_of, lay_out, room_for, total_bytes
from scale_surgery.folder.record import Manifest, read_manifest
from scale_surgery.folder.routers import check_paths_differ, describe_router, router_for
from scale_surgery.folder.write import write_router
from scale_surgery.modeling.expanded_routers import PosteriorRouter, Router
from scale_surgery.planning.methods import refuse
from scale_surgery.progress import Track, no_track


@dataclass(frozen=True)
class Routed:
    """Result of `route_export` and `unroute`.

    Attributes:
        path: The new checkpoint.
        base_name: What its base model is called.
        routing: How it routes, or None where the router was taken away.
        forks: Of each expansion with W12 the first layer where it has one: from there it has a base stream of its own.
        layers: Layers of the base model.
        bytes_written: Bytes of shards that were written; 0 with hard links.
        left_out: Files that were not taken along: weights in other formats, links that lead out of the folder, and
            states of an unfinished run and reports of runs.
    """

    path: Path
    base_name: str
    routing: Router | None
    forks: tuple[int, ...]
    layers: int
    bytes_written: int
    left_out: tuple[str, ...] = ()

    @property
    def cost(self) -> float:
        """Cost of the layers in a forward, as a multiple of one path: 1 + (L - L_fp) / L for each of these."""
        return 1 + sum((self.layers - fork) / self.layers for fork in self.forks)


def route_export(
    expanded: str | Path,
    output: str | Path,
    routing: Router = PosteriorRouter(),
    *,
    base_weights: BaseWeights = "auto",
    overwrite: bool = False,
    track: Track = no_track,
) -> Routed:
    """Write a checkpoint whose model computes all paths in one forward pass and routes each token.

    Args:
        expanded: Folder of an expanded checkpoint. A router that it has is replaced.
        output: Folder to be.
        routing: The router; numbers that are not given have their defaults.
        base_weights: How base shards are taken over: "auto", "copy" or "link".
        overwrite: Whether an existing output folder may be replaced.
        track: Makes progress bars.

    Returns:
        What was done.

    Raises:
        PlanError: If the numbers make no sense, or the router cannot tell the paths of this model apart.
        CheckpointError: If this is no expanded checkpoint, or the output cannot be written.
    """
    folder = open_folder(Path(expanded))
    manifest = folder.manifest
    routing = router_for(routing, len(manifest.expansions))
    refuse_fused(folder)
    # several expansions are only written where all can pass
    if len(manifest.expansions) == 1:
        refuse(manifest.plan.method, "route", expanded)
        if problems := path_problems_of(manifest.plan):
            raise PlanError(*problems)
    check_paths_differ(routing, bool(_forks(manifest)))
    return _write(folder, routing, Path(output), base_weights, track, overwrite=overwrite)


def unroute(
    routed: str | Path,
    output: str | Path,
    *,
    base_weights: BaseWeights = "auto",
    overwrite: bool = False,
    track: Track = no_track,
) -> Routed:
    """Write a routed checkpoint without its router, with the tensors that were trained since.

    Args:
        routed: Folder of a routed checkpoint.
        output: Folder to be.
        base_weights: How base shards are taken over: "auto", "copy" or "link".
        overwrite: Whether an existing output folder may be replaced.
        track: Makes progress bars.

    Returns:
        What was done.

    Raises:
        CheckpointError: If this is no routed checkpoint, or the output cannot be written.
    """
    folder = open_folder(Path(routed))
    refuse_fused(folder)
    manifest = folder.manifest
    if manifest.routing is None:
        raise CheckpointError(Problem("model-unrouted", routed))
    if len(manifest.expansions) > 1:
        raise PlanError(Problem("router-needed", routed, names=list(manifest.expansions)))
    return _write(folder, None, Path(output), base_weights, track, overwrite=overwrite)


def set_routing(routed: str | Path, routing: Router) -> None:
    """Change the numbers of a routed checkpoint's router in place; config.json and surgery.json are written.

    Args:
        routed: Folder of a routed checkpoint.
        routing: The same router with other numbers.

    Raises:
        PlanError: If the numbers make no sense.
        CheckpointError: If this is no routed checkpoint, or one with another router, or it cannot be written.
    """
    folder = open_folder(Path(routed))
    manifest = folder.manifest
    routing = router_for(routing, len(manifest.expansions))
    refuse_fused(folder)
    before, names = manifest.routing, tuple(manifest.expansions)
    if before is None:
        raise CheckpointError(Problem("model-unrouted", routed))
    if before.router != routing.router or before.paths(names) != routing.paths(names):
        values = {"router": describe_router(before), "wanted": describe_router(routing)}
        raise CheckpointError(Problem("router-other", routed, **values))
    if not isinstance(settings := folder.config[CONFIG_KEY].get(ROUTER_KEY), dict):
        place = f"{folder.path / CONFIG_FILE}: {CONFIG_KEY}.{ROUTER_KEY}"
        raise CheckpointError(Problem("config-specs", place, value=settings))
    text = read_text(folder, CONFIG_FILE)
    try:
        write_router(folder.path, folder, routing)
    except BaseException as error:
        # the two say the same, or nothing has changed
        with contextlib.suppress(OSError, CheckpointError):
            if read_manifest(folder.path).routing == before:
                write_text(folder.path / CONFIG_FILE, text)
        if not isinstance(error, OSError):
            raise
        raise CheckpointError(Problem("path-unwritable", routed, error=error.strerror or error)) from error


def _write(
    folder: Folder,
    routing: Router | None,
    target: Path,
    base_weights: BaseWeights,
    track: Track,
    *,
    overwrite: bool,
) -> Routed:
    """Write a folder with a router or without; every file but config and record is taken over as a file."""
    manifest = folder.manifest
    refuse_linked(folder)
    left_behind = folder.left_out
    left = (*left_behind, CONFIG_FILE)
    files = {file: folder.path / file for file in (*folder.shards, *folder.side_files) if file not in left}
    check_target(target, [folder.path], overwrite=overwrite)
    check_space(target, room_for(files, target, base_weights))
    refuse_damaged(folder, track)
    state = {"route": with_router(folder.config, routing), "base_weights": base_weights}
    with staged(target, state, folder.stamps, overwrite=overwrite) as partial:
        with track("files", total_bytes(files)) as advance:
            lay_out(files, partial, base_weights, advance)
        write_router(partial, folder, routing)
    return Routed(
        path=target,
        base_name=manifest.base_name,
        routing=routing,
        forks=() if routing is None else _forks(manifest),
        layers=manifest.first_plan.sizes.layers,
        bytes_written=0 if base_weights == "link" else sum(bytes_of(files[shard]) for shard in folder.shards),
        left_out=left_behind,
    )


def _forks(manifest: Manifest) -> tuple[int, ...]:
    """Return the first layer with W12 of each expansion that has one: the path forks there."""
    layers = (plan.collaboration.layers for plan in manifest.plans.values())
    return tuple(min(wide) for wide in layers if wide)
