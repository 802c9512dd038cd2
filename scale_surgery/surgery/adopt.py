"""Make an expanded folder of what another trainer saved: its new tensors in the layout of `expand`.

what was trained   an expanded folder; or its base, expanded again as the saved config.json says
what was saved     matched with it tensor by tensor; every base tensor is compared with the base's
the new folder     what was trained, with the saved tensors in place of its new ones
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from scale_surgery.checkpoint.files import BaseWeights, plain_json, write_text
from scale_surgery.checkpoint.folder import Checkpoint, name_tensors, open_checkpoint
from scale_surgery.checkpoint.forms import Form, form_of
from scale_surgery.checkpoint.hashes import changed_tensors
from scale_surgery.checkpoint.headers import read_header
from scale_surgery.checkpoint.names import LOG_FILE, TRAINING_FOLDER
from scale_surgery.checkpoint.numbering import CONFIG_KEY
from scale_surgery.checkpoint.shards import tensor_bytes, write_shard
from scale_surgery.checkpoint.sources import Source, find_source
from scale_surgery.checkpoint.staging import check_space, check_target, staged
from scale_surgery.deriving.planned import make_plan
from scale_surgery.errors import CheckpointError, PlanError, Problem
from scale_surgery.folder.check import refuse_damaged
from scale_surgery.folder.config import expanded_config
from scale_surgery.folder.folder import Folder, open_folder, refuse_fused, refuse_linked
from scale_surgery.folder.record import ExpansionRecord, tool_versions
from scale_surgery.folder.routers import router_of
from scale_surgery.folder.write import least_base_bytes, write_folder
from scale_surgery.planning.plan import Origin
from scale_surgery.planning.saved import saved_origins
from scale_surgery.progress import Track, no_track
from scale_surgery.running.loading import load_config
from scale_surgery.running.matching import Match
from scale_surgery.running.options import RunOptions
from scale_surgery.surgery.same_base import hash_base
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
    """What `adopt` did.

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


def default_output(saved: str | Path) -> Path:
    """Where an adopted model goes when nothing is said: `<name>-adopted` in the current folder."""
    return Path(f"{find_source(saved).name.rsplit('/', 1)[-1]}-adopted")


def adopt(
    saved: str | Path,
    expanded: str | Path | None = None,
    output: str | Path | None = None,
    base: str | Path | None = None,
    *,
    base_weights: BaseWeights = "auto",
    overwrite: bool = False,
    run: RunOptions = RunOptions(),
    track: Track = no_track,
) -> Adopted:
    """Make an expanded checkpoint of what another trainer saved of one.

    Args:
        saved: What it saved: a folder with safetensors weights, or a Hub id.
        expanded: The expanded model that was trained, a folder or a Hub id. Default: it is made again from its base.
        output: Folder to be; default `<name>-adopted` in the current folder.
        base: The base model, a folder or a Hub id. Default: the Hub repository that config.json names, at its commit.
        base_weights: How base shards are taken over: "auto", "copy" or "link".
        overwrite: Whether an existing output folder may be replaced.
        run: Where the start of the new tensors is computed, and how the base's tokenizer is loaded, without `expanded`:
            device, trust_remote_code.
        track: Makes progress bars.

    Returns:
        What was done.

    Raises:
        CheckpointError: If a base tensor is not the base's, a tensor is missing, unexpected or of another shape, the
            weights lie there in a form that only their trainer reads, or the output cannot be written; nothing is
            written then.
        PlanError: If both an expanded model and a base are given, or the base cannot be expanded as it was.
    """
    if expanded is not None and base is not None:
        raise PlanError(Problem("base-with-expanded", "--base"))
    _check_places(saved, expanded, base)
    trained = None if expanded is None else _open_expanded(expanded)
    given = open_saved(saved, {} if trained is None else trained.config)
    # imports torch, so that a folder in the wrong place is refused before
    run = run.placed()
    trained = trained or _plan_again(given, base, run, track)
    checkpoint = trained.checkpoint
    target = Path(output) if output is not None else default_output(saved)
    check_target(target, [given.checkpoint.path, checkpoint.path], overwrite=overwrite)
    check_specs(given, trained)
    match = match_tensors(given, trained)
    base_hashes = checkpoint.manifest.base_hashes if isinstance(checkpoint, Folder) else hash_base(checkpoint, track)
    compared = compare_base(given, trained, match, base_hashes, track)
    other_settings, other_computation = compare_settings(given, trained)
    if isinstance(checkpoint, Folder):
        refuse_damaged(checkpoint, track)
    base_bytes = least_base_bytes(checkpoint, trained.first_plan, base_weights)
    check_space(target, trained.bytes_added + base_bytes)
    state = {
        "adopt": [plan.to_json() for plan in trained.plans.values()],
        "base": base_hashes,
        "base_weights": base_weights,
    }
    routing = checkpoint.manifest.routing if isinstance(checkpoint, Folder) else router_of(trained.config[CONFIG_KEY])
    with staged(target, state, {**given.checkpoint.stamps, **checkpoint.stamps}, overwrite=overwrite) as partial:
        _write_new_tensors(given, trained, match, partial, track)
        expansions = _records(given, trained, compared, partial, run, track)
        written = write_folder(checkpoint, expansions, routing, partial, base_weights, run, track)
        if given.left.log:
            lines = (json.dumps(entry) + "\n" for entry in given.left.log)
            write_text(partial / TRAINING_FOLDER / LOG_FILE, "".join(lines))
    return Adopted(
        path=target,
        base_name=written.folder.manifest.base_name,
        base_tensors=compared.count,
        widened=compared.widened,
        expansion_tensors=len(trained.planned),
        trained_tensors=sum(len(record.trained or ()) for record in expansions.values()),
        rounded=rounded_dtypes(given, trained, match),
        steps=given.left.steps,
        read=given.left.read,
        not_read=given.left.not_read,
        other_settings=tuple(other_settings),
        other_computation=tuple(other_computation),
        bytes_written=written.base_bytes + trained.bytes_added,
    )


def _check_places(saved: str | Path, expanded: str | Path | None, base: str | Path | None) -> None:
    """Refuse folders that stand in each other's place, and a base as --expanded or the other way around."""
    wanted: Form = "base" if expanded is None else "expanded"
    option, given = f"--{wanted}", base if expanded is None else expanded
    if given is None:
        return
    form = form_of(find_source(given).path)
    if form == "saved" and form_of(find_source(saved).path) == wanted:
        command = _command_line(given, option, saved)
        raise CheckpointError(Problem("adopt-exchanged", given, option=option, saved=saved, command=command))
    if form != wanted and form in ("base", "expanded"):
        command = _command_line(saved, f"--{form}", given)
        raise CheckpointError(Problem("adopt-base" if form == "base" else "adopt-expanded", given, command=command))


def _command_line(*words: str | Path) -> str:
    return shlex.join(["scale-surgery", "adopt", *map(str, words), "-o", "OUT"])


def _open_expanded(expanded: str | Path) -> Trained:
    path = find_source(expanded).path
    folder = open_folder(path)
    refuse_fused(folder)
    refuse_linked(folder)
    if missing := [name for name in folder.manifest.base_tensors if name not in folder.tensors]:
        raise CheckpointError(*(Problem("tensor-not-in-folder", name, folder=expanded) for name in missing))
    return Trained(str(expanded), folder, folder.manifest.plans, folder.config)


def _plan_again(saved: Saved, base: str | Path | None, run: RunOptions, track: Track) -> Trained:
    """Plan again what was trained, from its base and what config.json keeps of the request."""
    if not saved.config:
        raise CheckpointError(Problem("saved-without-config", saved.name))
    origins = saved_origins(saved.config, saved.name)
    source = _find_base(saved, origins[0], base)
    checkpoint = open_checkpoint(source.path)
    refuse_linked(checkpoint)
    plans = {
        origin.request.name: make_plan(
            checkpoint, origin.request, name=source.name, revision=source.revision, run=run, track=track
        )
        for origin in origins
    }
    load_config(source.path, source.name, run)
    routing = router_of(saved.config[CONFIG_KEY])
    config = expanded_config(checkpoint.config, list(plans.values()), checkpoint.tensors, routing)
    return Trained(str(base or source.name), checkpoint, plans, plain_json(config))


def _find_base(saved: Saved, origin: Origin, base: str | Path | None) -> Source:
    if base is not None:
        return find_source(base, origin.base_revision if str(base) == origin.base_name else None)
    if origin.base_revision is None:
        raise CheckpointError(Problem("saved-base-local", saved.name, base=origin.base_name))
    return find_source(origin.base_name, origin.base_revision)


def _write_new_tensors(saved: Saved, trained: Trained, match: Match, partial: Path, track: Track) -> None:
    """Write the shards of new tensors; one that is there already, from an interrupted run, stays."""
    with track("new tensors", trained.bytes_added) as advance:
        for shard, entries in new_entries(saved, trained, match).items():
            if not (partial / shard).exists():
                write_shard(partial / shard, entries, advance)


def _records(
    saved: Saved, trained: Trained, compared: BaseComparison, partial: Path, run: RunOptions, track: Track
) -> dict[str, ExpansionRecord]:
    """The record of each expansion; the run is added to those that it changed, or to all where it changed nothing."""
    if isinstance(trained.checkpoint, Folder):
        records = dict(trained.checkpoint.manifest.expansions)
    else:
        records = _start_again(trained, run, track)
    shards = [shard for plan in trained.plans.values() for shard in plan.shards]
    headers = {name: info for shard in shards for name, info in read_header(partial, shard).items()}
    tensors = name_tensors(headers, trained.first_plan.numbering)
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
        run_entry = {**entry, "trained_parameters": sum(tensors[tensor].elements for tensor in changed[name])}
        training = (*records[name].training, run_entry)
        records[name] = replace(records[name], trained=changed[name], training=training)
    return records


def _start_again(trained: Trained, run: RunOptions, track: Track) -> dict[str, ExpansionRecord]:
    """Records of expansions as they begin; their tensors are made again to be hashed, and not written."""
    from scale_surgery.tensors.initialise import Initialiser

    records = dict[str, ExpansionRecord]()
    with track("their start", sum(plan.costs.parameters_added for plan in trained.plans.values())) as advance:
        for name, plan in trained.plans.items():
            hashes, initialiser = dict[str, str](), Initialiser(plan, trained.checkpoint, run.device)
            for tensor in plan.tensors:
                hashes[tensor.name] = hashlib.sha256(tensor_bytes(initialiser.make(tensor))).hexdigest()
                advance(tensor.elements)
            records[name] = ExpansionRecord(plan, hashes)
    return records
