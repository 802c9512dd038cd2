"""Make an expanded folder of what another trainer saved: its new tensors in the layout of `expand`.

With the expanded folder that was trained:

expanded folder  --as files, compared by hash-->  base shards, config, code, everything else
saved folder     --tensor by tensor-->            expansion-*.safetensors

Without it, its base and what config.json says of the request make all but the new tensors again, as `expand` would.
Every base tensor that was saved is compared with the base's first; one that differs ends it.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from scale_surgery.checkpoint.files import BaseWeights, plain_json, write_json, write_text
from scale_surgery.checkpoint.folder import Checkpoint, open_checkpoint
from scale_surgery.checkpoint.forms import Form, form_of
from scale_surgery.checkpoint.hashes import changed_tensors
from scale_surgery.checkpoint.names import CONFIG_FILE, LOG_FILE, MANIFEST_FILE, TRAINING_FOLDER
from scale_surgery.checkpoint.numbering import CONFIG_KEY
from scale_surgery.checkpoint.shards import tensor_bytes, write_shard
from scale_surgery.checkpoint.sources import Source, find_source
from scale_surgery.checkpoint.staging import check_space, check_target, staged
from scale_surgery.deriving.planned import make_plan
from scale_surgery.errors import CheckpointError, PlanError, shorten
from scale_surgery.planning.plan import Origin, Plan
from scale_surgery.planning.saved import saved_origins
from scale_surgery.progress import Progress, Track, no_track
from scale_surgery.running.loading import load_base_config
from scale_surgery.running.matching import Match
from scale_surgery.running.options import RunOptions
from scale_surgery.surgery.config import expanded_config
from scale_surgery.surgery.expand import least_base_bytes
from scale_surgery.surgery.intact import refuse_damaged
from scale_surgery.surgery.record import (
    ExpansionRecord,
    Manifest,
    check_numbering,
    read_manifest,
    refuse_fused,
    refuse_linked,
    tool_versions,
)
from scale_surgery.surgery.routers import router_of
from scale_surgery.surgery.same_base import hash_base
from scale_surgery.surgery.saved import (
    Saved,
    Trained,
    check_specs,
    fit,
    open_saved,
    other_computation,
    other_settings,
)
from scale_surgery.surgery.saved_values import Compared, compare_base, new_entries, rounded_dtypes
from scale_surgery.surgery.write_folder import base_shards, running_dtype, write_anew, write_around

# what folders are called that stand in each other's place
TITLES: Mapping[Form, str] = {
    "expanded": "an expanded model",
    "base": "a base model",
    "saved": "what a trainer saved of an expanded model",
}


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
        raise PlanError("--base with --expanded: an expanded model holds its base. Leave out one of the two.")
    _check_places(saved, expanded, base)
    wide = None if expanded is None else _open_expanded(expanded)
    found = open_saved(saved, None if wide is None else wide.checkpoint.config)
    run = run.placed()
    trained = _again(found, base, run, track) if wide is None else wide.trained
    target = Path(output) if output is not None else default_output(saved)
    check_target(target, [found.checkpoint.path, trained.checkpoint.path], overwrite=overwrite)
    check_specs(found, trained)
    match = fit(found, trained)
    base_hashes = hash_base(trained.checkpoint, track) if wide is None else wide.manifest.base_hashes
    compared = compare_base(found, trained, match, base_hashes, track)
    settings, computation = tuple(other_settings(found, trained)), tuple(other_computation(found, trained))
    if wide is not None:
        refuse_damaged(wide.checkpoint, wide.manifest, track)
    check_space(target, _needed_bytes(trained, wide, base_weights))
    state = {
        "adopt": [plan.to_json() for plan in trained.plans.values()],
        "base": dict(base_hashes),
        "base_weights": base_weights,
    }
    stamps = {**found.checkpoint.stamps, **trained.checkpoint.stamps}
    with staged(target, state, stamps, overwrite=overwrite) as partial:
        _write_new(found, trained, match, partial, track)
        if wide is None:
            written = _write_again(found, trained, partial, base_weights, run, track)
        else:
            written = write_anew(wide.checkpoint, wide.manifest, trained.plans, partial, base_weights, track)
        manifest = _write_records(found, wide, compared, partial)
    return Adopted(
        path=target,
        base_name=manifest.base_name,
        base_tensors=compared.count,
        widened=compared.widened,
        expansion_tensors=len(trained.planned),
        trained_tensors=sum(len(own.trained or ()) for own in manifest.expansions.values()),
        rounded=rounded_dtypes(found, trained, match),
        steps=found.left.steps,
        read=found.left.read,
        not_read=found.left.not_read,
        other_settings=settings,
        other_computation=computation,
        bytes_written=written + trained.bytes_added,
    )


def _check_places(saved: str | Path, expanded: str | Path | None, base: str | Path | None) -> None:
    """Refuse folders that stand in each other's place, and a base as --expanded or the other way around."""
    given = base if expanded is None else expanded
    if given is None:
        return
    option = "--base" if expanded is None else "--expanded"
    wanted: Form = "base" if expanded is None else "expanded"
    found, other = (form_of(find_source(own).path) for own in (given, saved))
    if found == "saved" and other == wanted:
        raise CheckpointError(
            f"{saved}: is {TITLES[wanted]}, and {given}, given as {option}, is {TITLES[found]}. Exchange them: "
            f"{_line(given, option, saved)}"
        )
    if found != wanted and found in ("base", "expanded"):
        right = "--base" if found == "base" else "--expanded"
        raise CheckpointError(
            f"{given}: is {TITLES[found]}, expected {TITLES[wanted]} as {option}. Type: {_line(saved, right, given)}"
        )


def _line(*words: str | Path) -> str:
    return shlex.join(["scale-surgery", "adopt", *map(str, words), "-o", "OUT"])


@dataclass(frozen=True)
class _Wide:
    """The expanded folder that was trained."""

    checkpoint: Checkpoint
    manifest: Manifest
    trained: Trained


def _open_expanded(expanded: str | Path) -> _Wide:
    path = find_source(expanded).path
    checkpoint, manifest = open_checkpoint(path), read_manifest(path)
    refuse_fused(path, manifest)
    refuse_linked(path, manifest)
    check_numbering(checkpoint, manifest)
    missing = [
        f"{name}: is missing from {expanded}." for name in manifest.base_tensors if name not in checkpoint.tensors
    ]
    if missing:
        raise CheckpointError.from_problems([*shorten(missing), "Restore its shard."])
    base = {name: info for name, info in checkpoint.tensors.items() if name in manifest.base_tensors}
    trained = Trained(str(expanded), checkpoint, manifest.plans, base, checkpoint.config)
    return _Wide(checkpoint, manifest, trained)


def _again(saved: Saved, base: str | Path | None, run: RunOptions, track: Track) -> Trained:
    """What was trained, planned again from its base and what config.json says of the request."""
    if not saved.config:
        raise CheckpointError(
            f"{saved.name}: has no {CONFIG_FILE}, as what is put together of shares, so that nothing names its base. "
            "Give the expanded model that was trained: --expanded EXPANDED."
        )
    origins = saved_origins(saved.config, saved.name)
    source = _find_base(saved, origins[0], base)
    checkpoint = open_checkpoint(source.path)
    plans = {
        own.request.name: make_plan(
            checkpoint, own.request, name=source.name, revision=source.revision, run=run, track=track
        )
        for own in origins
    }
    load_base_config(source.path, source.name, run)
    routing = router_of(saved.config[CONFIG_KEY])
    config = expanded_config(checkpoint.config, list(plans.values()), running_dtype(checkpoint), routing)
    return Trained(str(base or source.name), checkpoint, plans, checkpoint.tensors, plain_json(config))


def _find_base(saved: Saved, origin: Origin, base: str | Path | None) -> Source:
    if base is not None:
        return find_source(base, origin.base_revision if str(base) == origin.base_name else None)
    if origin.base_revision is None:
        raise CheckpointError(
            f"{saved.name}: was made from a folder called {origin.base_name}, which cannot be looked up. Give the "
            "expanded model that was trained, --expanded EXPANDED, or that folder, --base MODEL."
        )
    return find_source(origin.base_name, origin.base_revision)


def _needed_bytes(trained: Trained, wide: _Wide | None, how: BaseWeights) -> int:
    if wide is None:
        return trained.bytes_added + least_base_bytes(trained.checkpoint, trained.facts, how)
    shards = base_shards(wide.checkpoint, wide.manifest) if how == "copy" else []
    sizes = ((wide.checkpoint.path / shard).stat().st_size for shard in shards)
    return sum(sizes) + trained.bytes_added


def _write_new(saved: Saved, trained: Trained, match: Match, partial: Path, track: Track) -> None:
    """Write the shards of new tensors; one that is there already, from an interrupted run, stays."""
    with track("new tensors", trained.bytes_added) as advance:
        for shard, entries in new_entries(saved, trained, match).items():
            if not (partial / shard).exists():
                write_shard(partial / shard, entries, advance)


def _write_again(saved: Saved, trained: Trained, partial: Path, how: BaseWeights, run: RunOptions, track: Track) -> int:
    """Write what `expand` and `route_export` would, but the new tensors; their start is recorded as they made it."""
    routing = router_of(saved.config[CONFIG_KEY])
    with track("their start", sum(plan.costs.parameters_added for plan in trained.plans.values())) as advance:
        began = {
            name: ExpansionRecord(plan, _starts(plan, trained.checkpoint, run, advance))
            for name, plan in trained.plans.items()
        }
    written, _ = write_around(began, trained.checkpoint, partial, how, run, track, routing)
    return written


def _starts(plan: Plan, base: Checkpoint, run: RunOptions, advance: Progress) -> dict[str, str]:
    """sha256 of each new tensor as `expand` makes it."""
    from scale_surgery.surgery.initialise import make_tensor

    found = dict[str, str]()
    for tensor in plan.tensors:
        found[tensor.name] = hashlib.sha256(tensor_bytes(make_tensor(plan, tensor, base, run.device))).hexdigest()
        advance(tensor.elements)
    return found


def _write_records(saved: Saved, wide: _Wide | None, compared: Compared, partial: Path) -> Manifest:
    """Write what the trainer logged, and what surgery.json keeps of the run, with each expansion that it trained."""
    left, manifest, written = saved.left, read_manifest(partial), open_checkpoint(partial)
    if left.log:
        write_text(partial / TRAINING_FOLDER / LOG_FILE, "".join(json.dumps(entry) + "\n" for entry in left.log))
    run = {
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
    now = {
        name: changed_tensors(written, [tensor.name for tensor in own.plan.tensors], own.tensors)
        for name, own in manifest.expansions.items()
    }
    before = {} if wide is None else {name: own.trained or {} for name, own in wide.manifest.expansions.items()}
    # where nothing differs it may have been any
    ran = [name for name, trained in now.items() if trained != before.get(name, {})] or list(now)
    expansions = dict(manifest.expansions)
    for name in ran:
        own = expansions[name]
        sizes = (tensor.elements for tensor in own.plan.tensors if tensor.name in now[name])
        entry = {**run, "trained_parameters": sum(sizes)}
        expansions[name] = replace(own, trained=now[name], training=(*own.training, entry))
    # what was verified is what was expanded
    manifest = replace(manifest, expansions=expansions, verification=None)
    write_json(partial / MANIFEST_FILE, manifest.to_json())
    return manifest
