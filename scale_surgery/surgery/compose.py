"""Put many expansions of one base into one folder: chosen by name, or weighed by a router over K + 1 paths.

base, or expanded folder  --as files-->                      the same
each extract              --as files, shards by its name-->  expansion-NAME-*.safetensors
config.json, *.py, index, surgery.json                       say which expansions there are, and how they are routed
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scale_surgery.checkpoint.expansions import BASE_KEY, DEFAULT_NAME, EXPANSIONS_KEY, expansion_of, renamed
from scale_surgery.checkpoint.files import BaseWeights, check_base_weights, take_over
from scale_surgery.checkpoint.folder import Checkpoint, open_checkpoint
from scale_surgery.checkpoint.names import MANIFEST_FILE
from scale_surgery.checkpoint.numbering import CONFIG_KEY
from scale_surgery.checkpoint.shards import header_bytes
from scale_surgery.checkpoint.sources import Source, find_source, listed
from scale_surgery.checkpoint.staging import check_space, check_target, staged
from scale_surgery.errors import CheckpointError, PlanError
from scale_surgery.modeling.expanded_routers import PosteriorRouter, Router
from scale_surgery.planning.base import Base, base_alone
from scale_surgery.planning.plan import SHARD_STEM, Plan, plan_expansion
from scale_surgery.planning.reserved import check_clashes
from scale_surgery.progress import Progress, Track, no_track
from scale_surgery.running.expansion_names import check_name
from scale_surgery.running.options import RunOptions
from scale_surgery.surgery.beside import check_beside, with_expansions
from scale_surgery.surgery.extract_folder import Extract, check_own_files, open_extract
from scale_surgery.surgery.intact import refuse_damaged
from scale_surgery.surgery.record import ExpansionRecord, Manifest, read_manifest, refuse_fused, refuse_linked
from scale_surgery.surgery.renumbered import aligned_header, write_with_header
from scale_surgery.surgery.routers import router_for
from scale_surgery.surgery.same_base import check_fit, find_differing, hash_base, refuse_differing
from scale_surgery.surgery.write_folder import write_anew, write_around

ADVICE = "An expansion runs on its own base alone: take it out of the list, or give that base."


@dataclass(frozen=True)
class Composed:
    """What `compose` did.

    Attributes:
        path: The folder.
        base_name: What its base model is called.
        expansions: Tensors of each expansion, by its name, in the order of the paths.
        routing: How the paths are mixed; None where there is but one expansion, and no router.
        bytes_added: Bytes of all expansions.
        left_out: Files that were not taken along.
        removed: Expansions of the given folder that were left out. They may have been damaged; all else was not.
    """

    path: Path
    base_name: str
    expansions: Mapping[str, int]
    routing: Router | None
    bytes_added: int
    left_out: tuple[str, ...]
    removed: tuple[str, ...] = ()


def compose(
    base: str | Path,
    extracts: Mapping[str, str | Path] | Sequence[str | Path] | str | Path,
    output: str | Path,
    *,
    remove: Sequence[str] | str = (),
    routing: Router | None = None,
    base_weights: BaseWeights = "auto",
    overwrite: bool = False,
    track: Track = no_track,
) -> Composed:
    """Write one folder of a base and many expansions, which loads as one model whose router weighs K + 1 paths.

    Args:
        base: The base model, a folder or a Hub id; or an expanded folder, whose expansions stay.
        extracts: Extracts by the names that they get; one alone, or each of a list, is called as it was made, or as its
            folder is where that is `default`, with _ in place of hyphens and dots.
        output: Folder to be.
        remove: Expansions of an expanded folder that are left out, damaged or not; all else must be what was written.
        routing: How the paths are mixed. Default: all alike at the start of a text; of an expanded folder as there.
        base_weights: How base shards are taken over: "auto", "copy" or "link".
        overwrite: Whether an existing output folder may be replaced.
        track: Makes progress bars.

    Returns:
        What was done.

    Raises:
        CheckpointError: If something is no extract, was made on another base (the tensors are named), or the output
            cannot be written.
        PlanError: If a name cannot be had, the numbers make no sense, or an expansion cannot run beside others.
    """
    target, source = Path(output), find_source(base)
    check_base_weights(base_weights)
    remove = (remove,) if isinstance(remove, str) else tuple(dict.fromkeys(remove))
    given, before = _open(source, remove)
    opened = _named(extracts)
    kept = {} if before is None else dict(before.expansions)
    check_target(target, [source.path, *(own.path for own in opened.values())], overwrite=overwrite)
    alone = base_alone(given)
    for extract in opened.values():
        check_fit(extract, alone, source.name)
    # whether torch has a name for itself is known seconds later
    _check_names(opened, kept)
    plans = {name: _plan_here(extract, name, alone, source, before) for name, extract in opened.items()}
    check_beside([*(own.plan for own in kept.values()), *plans.values()])
    added = {name: _record(extract, plans[name]) for name, extract in opened.items()}
    routing = None if routing is None else router_for(routing, len(kept) + len(added))
    bytes_added = sum(own.plan.costs.bytes_added for own in (*kept.values(), *added.values()))
    base_bytes = sum((given.path / shard).stat().st_size for shard in given.shards)
    check_space(target, bytes_added + base_bytes * (base_weights == "copy"))
    # what can be known without reading the base was asked before
    if before is None:
        check_clashes(given)
        hashes: Mapping[str, str] = hash_base(given, track)
    else:
        refuse_damaged(_without_router(given, before), replace(before, routing=None), track)
        hashes = before.base_hashes
    for name, extract in opened.items():
        _check_base(name, extract, given, source.name, hashes, track)
    state = {
        "compose": {name: [dict(own.tensors), own.plan.to_json()] for name, own in (kept | added).items()},
        "routing": None if routing is None else routing.settings,
        "base_weights": base_weights,
    }
    stamps = {**given.stamps, **{file: own for extract in opened.values() for file, own in extract.stamps.items()}}
    with staged(target, state, stamps, overwrite=overwrite) as partial:
        with track("expansions", sum(own.plan.costs.bytes_added for own in added.values())) as advance:
            for name, extract in opened.items():
                _place(extract, plans[name], partial, base_weights, advance)
        if before is None:
            routing = routing or (PosteriorRouter().for_expansions(len(added)) if len(added) > 1 else None)
            # the record says where the tensors were computed, as the extracts do
            run = RunOptions(next(iter(opened.values())).manifest.tool.get("device", "cpu"))
            write_around(added, given, partial, base_weights, run, track, routing)
        else:
            composed = with_expansions(before, {**kept, **added}, routing)
            routing = composed.routing
            write_anew(given, composed, list(added), partial, base_weights, track)
        _check_written(partial, source)
    return Composed(
        path=target,
        base_name=source.name if before is None else before.base_name,
        expansions={name: len(own.plan.tensors) for name, own in (kept | added).items()},
        routing=routing,
        bytes_added=bytes_added,
        left_out=given.left_out,
        removed=remove,
    )


def _open(source: Source, remove: Sequence[str]) -> tuple[Checkpoint, Manifest | None]:
    """The base model; or an expanded folder without what is removed, whatever has become of that."""
    if not (source.path / MANIFEST_FILE).is_file():
        if remove:
            raise PlanError(
                f"remove: {', '.join(remove)}: {source.name} has no expansions, expected an expanded folder."
            )
        return open_checkpoint(source.path), None
    manifest = read_manifest(source.path)
    refuse_fused(source.path, manifest)
    refuse_linked(source.path, manifest)
    known = list(manifest.expansions)
    if problems := [
        f"remove: {name} is no expansion of this folder, expected {' or '.join(known)}."
        for name in remove
        if name not in known
    ]:
        raise PlanError.from_problems(problems)
    checkpoint = open_checkpoint(source.path, without=tuple(f"{SHARD_STEM}{name}-" for name in remove))
    left = {name: own for name, own in manifest.expansions.items() if name not in remove}
    routing = manifest.routing.without_prior() if manifest.routing and remove else manifest.routing
    return checkpoint, replace(manifest, expansions=left, routing=routing)


def _without_router(checkpoint: Checkpoint, manifest: Manifest) -> Checkpoint:
    """A folder whose config.json names the expansions of a record alone, and no router: it would weigh others too."""
    specs = checkpoint.config[CONFIG_KEY]
    kept = [own for own in specs[EXPANSIONS_KEY] if own.get("name") in manifest.expansions]
    return replace(
        checkpoint, config={**checkpoint.config, CONFIG_KEY: {BASE_KEY: specs[BASE_KEY], EXPANSIONS_KEY: kept}}
    )


def _named(extracts: Mapping[str, str | Path] | Sequence[str | Path] | str | Path) -> dict[str, Extract]:
    """Extracts by name; one that was made as `default` is called as its folder is.

    Raises:
        PlanError: If two would have the same name, or one is no folder.
    """
    given = list(extracts.values()) if isinstance(extracts, Mapping) else listed(extracts)
    if problems := [
        f"extracts: {own!r} is no folder, expected the path of one or a Hub id."
        for own in given
        if not isinstance(own, str | Path)
    ]:
        raise PlanError.from_problems(problems)
    opened = [open_extract(extract) for extract in given]
    names = list(extracts) if isinstance(extracts, Mapping) else [_name_of(own) for own in opened]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise PlanError(
            f"names: {', '.join(twice)} would be the name of several extracts, expected a name for each. Give --names."
        )
    return dict(zip(names, opened, strict=True))


def _name_of(extract: Extract) -> str:
    """What an extract is called; names of folders often have hyphens and dots, and may begin with a digit."""
    made = extract.manifest.name
    return re.sub(r"\W|^(?=\d)", "_", Path(extract.name).name) if made == DEFAULT_NAME else made


def _check_names(wanted: Mapping[str, Extract], kept: Mapping[str, ExpansionRecord]) -> None:
    problems = []
    for name in wanted:
        try:
            check_name(name, kept)
        except PlanError as error:
            problems.append(str(error))
    problems += [] if wanted or kept else ["extracts: none is given or left, expected at least one expansion."]
    if problems:
        raise PlanError.from_problems(problems)


def _plan_here(extract: Extract, name: str, base: Checkpoint, source: Source, before: Manifest | None) -> Plan:
    """Its plan, by the name that it gets, on the base that it comes to stand beside."""
    called = (source.name, source.revision) if before is None else (before.base_name, before.base_revision)
    made = extract.manifest.plan
    return plan_expansion(Base(base, made.facts), replace(made.request, name=name), name=called[0], revision=called[1])


def _record(extract: Extract, plan: Plan) -> ExpansionRecord:
    """What surgery.json says of it, by the name that it gets."""
    known = extract.manifest.expansions[extract.manifest.name]
    tensors, trained = (
        None if sums is None else {renamed(own, plan.request.name): digest for own, digest in sums.items()}
        for sums in (known.tensors, known.trained)
    )
    return replace(known, plan=plan, tensors=tensors or {}, trained=trained)


def _check_base(
    name: str, extract: Extract, given: Checkpoint, title: str, hashes: Mapping[str, str], track: Track
) -> None:
    """Refuse an extract that fits a base, and was made on another; and one whose files are not what it says."""
    base = replace(given, tensors={own: info for own, info in given.tensors.items() if expansion_of(own) is None})
    differing = find_differing(extract, base, hashes)
    refuse_differing(extract, f"{name}: {title}", differing, len(base.tensors), ADVICE)
    check_own_files(extract, track)


def _place(extract: Extract, plan: Plan, partial: Path, how: BaseWeights, advance: Progress) -> None:
    """Put the shards of an expansion into a folder, its tensors under the name that it gets there."""
    made, files = extract.manifest.plan, {name: info.file for name, info in extract.tensors.items()}
    places = {files[old.name]: new.shard for old, new in zip(made.tensors, plan.tensors, strict=True)}
    for file, shard in places.items():
        if made.request.name == plan.request.name:
            take_over(extract.path / file, partial / shard, how, advance)
            continue
        header = header_bytes(extract.path / file)[8:].decode("utf-8")
        named = {
            key if key == "__metadata__" else renamed(key, plan.request.name): entry
            for key, entry in json.loads(header).items()
        }
        write_with_header(extract.path / file, partial / shard, aligned_header(named, header), advance)


def _check_written(partial: Path, source: Source) -> None:
    """Refuse a folder in which a loader would find other tensors than those of the base and of the plans."""
    manifest = read_manifest(partial)
    if set(open_checkpoint(partial).tensors) != {*manifest.base_tensors, *manifest.planned}:
        raise CheckpointError(
            f"{source.name}: the files do not hold the tensors of the base and of the plans. Extract the expansions "
            "again."
        )
