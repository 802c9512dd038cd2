"""Give an expanded checkpoint a router, take it away again, or set its numbers: one key of config.json.

weights, tokenizer, *.py   --as files-->  the same
config.json                --edited-->    scale_surgery.router: which, and its numbers
surgery.json               --edited-->    the same; a verification stays, and names the router that it is about
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.expansions import ROUTER_KEY
from scale_surgery.checkpoint.files import BaseWeights, take_over, write_json, write_text
from scale_surgery.checkpoint.folder import Checkpoint, open_checkpoint, read_text
from scale_surgery.checkpoint.names import CONFIG_FILE, MANIFEST_FILE, REPORTS_FOLDER
from scale_surgery.checkpoint.numbering import CONFIG_KEY
from scale_surgery.checkpoint.staging import check_space, check_target, staged
from scale_surgery.errors import CheckpointError, PlanError
from scale_surgery.fields import problems_of
from scale_surgery.planning.methods import refuse
from scale_surgery.planning.routing_specs import Routing, path_problems
from scale_surgery.progress import Track, no_track
from scale_surgery.surgery.intact import refuse_damaged
from scale_surgery.surgery.record import Manifest, check_numbering, read_manifest, refuse_fused, refuse_linked


@dataclass(frozen=True)
class Routed:
    """What `route_export` did.

    Attributes:
        path: The new checkpoint.
        base_name: What its base model is called.
        routing: How it routes, or None where the router was taken away.
        fork: First layer that both paths run; None where they part only in the head.
        layers: Layers of the base model.
        bytes_written: Bytes of shards that were written; 0 with hard links.
        left_out: Files that were not taken along: weights in other formats, links that lead out of the folder.
    """

    path: Path
    base_name: str
    routing: Routing | None
    fork: int | None
    layers: int
    bytes_written: int
    left_out: tuple[str, ...] = ()

    @property
    def cost(self) -> float:
        """Cost of the layers in a forward, as a multiple of the model without a router: 1 + (L - L_fp) / L."""
        return 1.0 if self.routing is None or self.fork is None else 1 + (self.layers - self.fork) / self.layers


def _refuse_one_path(manifest: Manifest) -> None:
    """Refuse a model through which two paths would have to pass, and cannot."""
    fork = min(manifest.plan.collaboration.layers, default=None)
    if problems := path_problems(manifest.plan.architecture, fork):
        raise PlanError.from_problems(problems)


def check_routing(routing: Routing) -> None:
    """Check that the numbers of a router make sense, on any model.

    Raises:
        PlanError: If not; every number that does not is named.
    """
    problems = problems_of(routing, "{option}: {value}")
    if problems:
        raise PlanError.from_problems(problems)


def route_export(
    expanded: str | Path,
    output: str | Path,
    routing: Routing | None = None,
    *,
    base_weights: BaseWeights = "auto",
    overwrite: bool = False,
    track: Track = no_track,
) -> Routed:
    """Write a checkpoint whose model computes both paths in one forward pass and routes each token.

    Args:
        expanded: Folder of an expanded checkpoint without a router.
        output: Folder to be.
        routing: How to route; by default the posterior router with its defaults.
        base_weights: How base shards are taken over: "auto", "copy" or "link".
        overwrite: Whether an existing output folder may be replaced.
        track: Makes progress bars.

    Returns:
        What was done.

    Raises:
        PlanError: If the numbers make no sense, or the router cannot tell the two paths of this model apart.
        CheckpointError: If this is no expanded checkpoint, it routes already, or the output cannot be written.
    """
    routing = routing or Routing()
    check_routing(routing)
    checkpoint, manifest = open_checkpoint(Path(expanded)), read_manifest(Path(expanded))
    refuse_fused(checkpoint.path, manifest)
    refuse(manifest.plan.method, "route", expanded)
    _refuse_one_path(manifest)
    check_numbering(checkpoint, manifest)
    if manifest.routing is not None:
        raise CheckpointError(
            f"{expanded}: is a routed model already. Its numbers are changed by route-calibrate --write, or by "
            "scale_surgery.set_routing in Python; for another router take this one away first: --router none."
        )
    _check_paths(manifest, routing)
    return _write(checkpoint, manifest, routing, Path(output), Taking(base_weights, overwrite, track))


def with_router(config: Mapping[str, Any], routing: Routing | None) -> dict[str, Any]:
    """Edit config.json of an expanded model: its router, or none.

    Args:
        config: Parsed config.json.
        routing: How to route, or None.

    Returns:
        The new config.
    """
    own = {name: value for name, value in config[CONFIG_KEY].items() if name != ROUTER_KEY}
    return {**config, CONFIG_KEY: own if routing is None else {**own, ROUTER_KEY: routing.settings}}


def unroute(
    routed: str | Path,
    output: str | Path,
    *,
    base_weights: BaseWeights = "auto",
    overwrite: bool = False,
    track: Track = no_track,
) -> Routed:
    """Write a routed checkpoint without its router: what was there before it, and what was learned since.

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
    checkpoint, manifest = open_checkpoint(Path(routed)), read_manifest(Path(routed))
    refuse_fused(checkpoint.path, manifest)
    if manifest.routing is None:
        raise CheckpointError(f"{routed}: has no router, expected a model made by scale-surgery route-export.")
    return _write(checkpoint, manifest, None, Path(output), Taking(base_weights, overwrite, track))


def set_routing(routed: str | Path, routing: Routing) -> None:
    """Change the numbers of a routed checkpoint's router in place; config.json and surgery.json are written.

    Args:
        routed: Folder of a routed checkpoint.
        routing: The same router with other numbers.

    Raises:
        PlanError: If the numbers make no sense.
        CheckpointError: If this is no routed checkpoint, or one with another router, or it cannot be written.
    """
    check_routing(routing)
    checkpoint, manifest = open_checkpoint(Path(routed)), read_manifest(Path(routed))
    refuse_fused(checkpoint.path, manifest)
    known = manifest.routing
    if known is None or (known.router, known.is_strict) != (routing.router, routing.is_strict):
        found = "none" if known is None else known.description
        raise CheckpointError(f"{routed}: its router is {found}; it cannot become {routing.description}. Export anew.")
    check_numbering(checkpoint, manifest)
    _check_router(checkpoint)
    before = read_text(checkpoint, CONFIG_FILE)
    try:
        write_json(checkpoint.path / CONFIG_FILE, with_router(checkpoint.config, routing))
        write_json(checkpoint.path / MANIFEST_FILE, asdict(replace(manifest, routing=routing)))
    except OSError as error:
        # the two say the same, or nothing has changed
        with contextlib.suppress(OSError):
            write_text(checkpoint.path / CONFIG_FILE, before)
        raise CheckpointError(f"{routed}: cannot be written ({error.strerror or error}). Check the folder.") from error


def _check_router(checkpoint: Checkpoint) -> None:
    """Refuse a config.json that does not say how a routed model routes."""
    if not isinstance(known := checkpoint.config[CONFIG_KEY].get(ROUTER_KEY), dict):
        raise CheckpointError(
            f"{checkpoint.path / CONFIG_FILE}: scale_surgery.router is {known!r}, expected how the model routes. "
            "Restore config.json from where you got it."
        )


@dataclass(frozen=True)
class Taking:
    """How files are taken over."""

    base_weights: BaseWeights
    overwrite: bool
    track: Track


def _write(checkpoint: Checkpoint, manifest: Manifest, routing: Routing | None, target: Path, take: Taking) -> Routed:
    """Write a checkpoint with a router or without; every file but config and record is taken over as a file."""
    refuse_linked(checkpoint.path, manifest)
    files = [file for file in (*checkpoint.shards, *checkpoint.side_files) if not file.startswith(f"{REPORTS_FOLDER}/")]
    sizes = {file: (checkpoint.path / file).stat().st_size for file in files if file != CONFIG_FILE}
    check_target(target, [checkpoint.path], overwrite=take.overwrite)
    check_space(target, sum(sizes.values()) if take.base_weights == "copy" else 0)
    refuse_damaged(checkpoint, manifest, take.track)
    config = with_router(checkpoint.config, routing)
    state = {"route": config, "base_weights": take.base_weights}
    with (
        staged(target, state, checkpoint.stamps, overwrite=take.overwrite) as partial,
        take.track("files", sum(sizes.values())) as advance,
    ):
        for file, size in sizes.items():
            take_over(checkpoint.path / file, partial / file, take.base_weights)
            advance(size)
        write_json(partial / CONFIG_FILE, config)
        write_json(partial / MANIFEST_FILE, asdict(replace(manifest, routing=routing)))
    shards = sum(sizes[file] for file in checkpoint.shards)
    return Routed(
        path=target,
        base_name=manifest.base_name,
        routing=routing,
        fork=None if routing is None else min(manifest.plan.collaboration.layers, default=None),
        layers=manifest.plan.sizes.layers,
        bytes_written=0 if take.base_weights == "link" else shards,
        left_out=checkpoint.left_out,
    )


def _check_paths(manifest: Manifest, routing: Routing) -> None:
    """Refuse a router that could not tell the paths of a model apart."""
    has_paths = bool(manifest.plan.collaboration.layers)
    if not has_paths and routing.router == "cosine":
        raise PlanError(
            "router: cosine compares the base logits of both paths, and without W12 they are equal for every token; "
            "expected an adapt model. Take --router posterior, which also weighs what the up stream adds."
        )
