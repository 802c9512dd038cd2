"""Make an expanded folder of what another trainer saved: its new tensors in the layout of `expand`.

what was trained   an expanded folder
what was saved     matched with it tensor by tensor; every base tensor is compared with the base's
the new folder     what was trained, with the saved tensors in place of its new ones
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from scale_surgery.checkpoint.files import BaseWeights, write_text
from scale_surgery.checkpoint.folder import Checkpoint, name_tensors
from scale_surgery.checkpoint.forms import form_of
from scale_surgery.checkpoint.hashes import changed_tensors
from scale_surgery.checkpoint.headers import read_header
from scale_surgery.checkpoint.names import LOG_FILE, TRAINING_FOLDER
from scale_surgery.checkpoint.sources import find_source
from scale_surgery.checkpoint.staging import check_space, check_target, staged
from scale_surgery.errors import CheckpointError, Problem
from scale_surgery.folder.check import refuse_damaged
from scale_surgery.folder.folder import open_folder, refuse_fused, refuse_linked
from scale_surgery.folder.layout import Shard, lay_out, total_bytes
from scale_surgery.folder.record import ExpansionRecord, tool_versions
from scale_surgery.folder.write import room_for_base, write_folder
from scale_surgery.progress import Track, no_track
from scale_surgery.running.matching import Match
from scale_surgery.surgery.saved import (
    BaseComparison,
    Saved,
    Trained,
    check_specs,
    compare_base,
    compare_settings,
    match_tensors,
    new_entries,
    open_saved,
    rounded_dtypes,
)


@dataclass(frozen=True)
class Adopted:
    """Result of `adopt`.

    Attributes:
        path: The expanded checkpoint.
        base_name: What its base model is called.
        base_tensors: Base tensors that were saved, each compared with the base's; 0 where none was saved.
        widened: Those that were saved in another dtype with the same numbers, such as "F32 for BF16", each counted.
        expansion_tensors: Number of new tensors.
        trained_tensors: Those that are not as the expansion began.
        rounded: New tensors that were rounded to the dtype of the plan, such as "F32 to BF16", each counted.
        steps: Optimizer steps, where the trainer left their number.
        read: Files of the trainer of which numbers were recorded.
        not_read: Files of the trainer that were not read.
        other_settings: What was saved otherwise and changes no number of the model; what the trained model had stays.
        other_computation: Keys of the saved config.json with which it computed otherwise; what the trained model had
            stays here too.
        bytes_written: Bytes of shards that were written.
        left_out: Files of the trained model that were not taken along.
    """

    path: Path
    base_name: str
    base_tensors: int
    widened: Mapping[str, int]
    expansion_tensors: int
    trained_tensors: int
    rounded: Mapping[str, int]
    steps: int | None
    read: tuple[str, ...]
    not_read: tuple[str, ...]
    other_settings: tuple[str, ...]
    other_computation: tuple[str, ...]
    bytes_written: int
    left_out: tuple[str, ...]


def default_output(saved: str | Path) -> Path:
    """Return the default output folder: `<name>-adopted` in the current folder."""
    return Path(f"{find_source(saved).name.rsplit('/', 1)[-1]}-adopted")


def adopt(
    saved: str | Path,
    expanded: str | Path,
    output: str | Path | None = None,
    *,
    base_weights: BaseWeights = "auto",
    overwrite: bool = False,
    track: Track = no_track,
) -> Adopted:
    """Make an expanded checkpoint of what another trainer saved of one.

    Args:
        saved: What it saved: a folder with safetensors weights, or a Hub id.
        expanded: The expanded model that was trained, a folder or a Hub id.
        output: Folder to be; default `<name>-adopted` in the current folder.
        base_weights: How base shards are taken over: "auto", "copy" or "link".
        overwrite: Whether an existing output folder may be replaced.
        track: Makes progress bars.

    Returns:
        What was done.

    Raises:
        CheckpointError: If a base tensor is not the base's, a tensor is missing, unexpected or of another shape, the
            weights lie there in a form that only their trainer reads, or the output cannot be written; nothing is
            written then.
    """
    _check_places(saved, expanded)
    trained = _open_expanded(expanded)
    manifest, folder = trained.folder.manifest, trained.folder
    given = open_saved(saved, folder.config)
    target = Path(output) if output is not None else default_output(saved)
    check_target(target, [given.checkpoint.path, folder.path], overwrite=overwrite)
    check_specs(given, trained)
    match = match_tensors(given, trained)
    compared = compare_base(given, trained, match, track)
    other_settings, other_computation = compare_settings(given, trained)
    refuse_damaged(folder, track)
    room = room_for_base(folder, manifest.first_plan, target, base_weights)
    check_space(target, trained.bytes_added + room)
    state = {
        "adopt": [plan.to_json() for plan in manifest.plans.values()],
        "base": manifest.base_hashes,
        "base_weights": base_weights,
    }
    with staged(target, state, {**given.checkpoint.stamps, **folder.stamps}, overwrite=overwrite) as partial:
        _write_new_tensors(given, trained, match, partial, track)
        expansions = _records(given, trained, compared, partial)
        written = write_folder(folder, expansions, manifest.routing, partial, base_weights, track)
        if given.left.log:
            lines = (json.dumps(entry) + "\n" for entry in given.left.log)
            write_text(partial / TRAINING_FOLDER / LOG_FILE, "".join(lines))
    return Adopted(
        path=target,
        base_name=manifest.base_name,
        base_tensors=compared.count,
        widened=compared.widened,
        expansion_tensors=len(manifest.planned),
        trained_tensors=sum(len(record.trained or ()) for record in expansions.values()),
        rounded=rounded_dtypes(given, trained, match),
        steps=given.left.steps,
        read=given.left.read,
        not_read=given.left.not_read,
        other_settings=tuple(other_settings),
        other_computation=tuple(other_computation),
        bytes_written=written.base_bytes + trained.bytes_added,
        left_out=(*folder.left_out, *written.left_out),
    )


def _check_places(saved: str | Path, expanded: str | Path) -> None:
    """Refuse folders that stand in each other's place, and a base in place of the expanded model."""
    form = form_of(find_source(expanded).path)
    if form == "saved" and form_of(find_source(saved).path) == "expanded":
        command = shlex.join(["scale-surgery", "adopt", str(expanded), "--expanded", str(saved), "-o", "OUT"])
        raise CheckpointError(Problem("adopt-exchanged", expanded, saved=saved, command=command))
    if form == "base":
        raise CheckpointError(Problem("adopt-base", expanded))


def _open_expanded(expanded: str | Path) -> Trained:
    folder = open_folder(find_source(expanded).path)
    refuse_fused(folder)
    refuse_linked(folder)
    if missing := [name for name in folder.manifest.base_tensors if name not in folder.tensors]:
        raise CheckpointError(*(Problem("tensor-not-in-folder", name, folder=expanded) for name in missing))
    return Trained(str(expanded), folder)


def _write_new_tensors(saved: Saved, trained: Trained, match: Match, partial: Path, track: Track) -> None:
    """Write the shards of new tensors; one that is there already, from an interrupted run, stays."""
    shards = {name: Shard.of(entries) for name, entries in new_entries(saved, trained, match).items()}
    with track("new tensors", total_bytes(shards)) as advance:
        lay_out(shards, partial, advance=advance)


def _records(saved: Saved, trained: Trained, compared: BaseComparison, partial: Path) -> dict[str, ExpansionRecord]:
    """The record of each expansion; the run is added to those that it changed, or to all where it changed nothing."""
    manifest = trained.folder.manifest
    records = dict(manifest.expansions)
    shards = [shard for plan in manifest.plans.values() for shard in plan.shards]
    headers = {name: info for shard in shards for name, info in read_header(partial, shard).items()}
    tensors = name_tensors(headers, manifest.numbering)
    written = Checkpoint(partial, {}, tensors, tuple(shards), (), ())
    changed = {
        name: changed_tensors(written, [tensor.name for tensor in record.plan.tensors], record.tensors)
        for name, record in records.items()
    }
    ran = [name for name, record in records.items() if changed[name] != (record.trained or {})] or list(records)
    left = saved.left
    entry = {
        "by": "another trainer",
        "adopted": datetime.now(UTC).isoformat(timespec="seconds"),
        **({} if left.steps is None else {"steps": left.steps}),
        "base_compared": compared.count,
        "settings": dict(left.settings),
        "state": dict(left.state),
        "measured": {},
        "not_read": list(left.not_read),
        "tool": tool_versions(),
    }
    for name in ran:
        before = {**records[name].tensors, **(records[name].trained or {})}
        moved = changed_tensors(written, [tensor.name for tensor in records[name].plan.tensors], before)
        run_entry = {**entry, "trained_parameters": sum(tensors[tensor].elements for tensor in moved)}
        training = (*records[name].training, run_entry)
        records[name] = replace(records[name], trained=changed[name], training=training, strength=1.0)
    return records
