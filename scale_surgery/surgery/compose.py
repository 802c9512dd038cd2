"""Put many expansions of one base into one folder: chosen by name, or weighed by a router over K + 1 paths.

base, or expanded folder  --as files-->                      the same
each extract              --as files, shards by its name-->  expansion-NAME-*.safetensors
config.json, *.py, index, surgery.json                       list the expansions, and how they are routed
"""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scale_surgery.checkpoint.expansions import DEFAULT_NAME, renamed
from scale_surgery.checkpoint.files import BaseWeights, check_base_weights
from scale_surgery.checkpoint.folder import Checkpoint, open_checkpoint
from scale_surgery.checkpoint.hashes import hash_file
from scale_surgery.checkpoint.names import CARD_FILE, MANIFEST_FILE, TRAINING_FOLDER
from scale_surgery.checkpoint.sources import Source, find_source, listed
from scale_surgery.checkpoint.staging import check_space, check_target, staged
from scale_surgery.errors import CheckpointError, PlanError, Problem
from scale_surgery.folder.check import refuse_damaged
from scale_surgery.folder.config import path_problems_of
from scale_surgery.folder.extract_folder import (
    Extract,
    check_own_files,
    made_files,
    name_in_extract,
    open_extract,
    shards_of,
)
from scale_surgery.folder.folder import Folder, named_base, refuse_fused, refuse_linked, with_record
from scale_surgery.folder.layout import Content, lay_out, total_bytes
from scale_surgery.folder.parts import link_base
from scale_surgery.folder.record import ExpansionRecord, read_manifest
from scale_surgery.folder.routers import check_paths_differ, router_for
from scale_surgery.folder.write import EXTENDED, room_for_base, write_folder
from scale_surgery.modeling.expanded_routers import PosteriorRouter, Router
from scale_surgery.planning.base import Base, base_alone
from scale_surgery.planning.methods import refuse
from scale_surgery.planning.plan import SHARD_STEM, Plan, plan_expansion
from scale_surgery.planning.reserved import check_clashes
from scale_surgery.progress import Track, no_track
from scale_surgery.running.expansion_names import check_name
from scale_surgery.running.options import RunOptions
from scale_surgery.surgery.same_base import check_fit, find_differing, hash_base, other_computation, refuse_differing


@dataclass(frozen=True)
class Composed:
    """Result of `compose`.

    Attributes:
        path: The folder.
        base_name: What its base model is called.
        expansions: Tensors of each expansion, by its name, in the order of the paths.
        routing: How the paths are mixed; None where there is but one expansion, and no router.
        bytes_added: Bytes of all expansions.
        left_out: Files that were not taken along.
        removed: Expansions of the given folder that were left out. They may have been damaged; all else was not.
        warnings: Values of the base's config.json that were others where an expansion was made.
    """

    path: Path
    base_name: str
    expansions: Mapping[str, int]
    routing: Router | None
    bytes_added: int
    left_out: tuple[str, ...]
    removed: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


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
    check_base_weights(base_weights)
    target, source = Path(output), find_source(base)
    remove = (remove,) if isinstance(remove, str) else tuple(dict.fromkeys(remove))
    given = _open(source, remove)
    opened = _open_extracts(extracts)
    kept = given.manifest.expansions if isinstance(given, Folder) else {}
    check_target(target, [source.path, *(extract.path for extract in opened.values())], overwrite=overwrite)
    alone = base_alone(given)
    for extract in opened.values():
        check_fit(extract, alone, source.name)
    # torch, which takes some names for itself, takes seconds to import
    _check_names(opened, kept)
    base_name, revision = named_base(given, source)
    added = _plan_beside(opened, alone, base_name, revision)
    expansions = {**kept, **added}
    plans = [record.plan for record in expansions.values()]
    check_beside(plans)
    asked = None if routing is None else router_for(routing, len(expansions))
    if asked is not None:
        check_paths_differ(asked, any(plan.collaboration.layers for plan in plans))
    routing = routing_beside(given, len(expansions), asked)
    bytes_added = sum(plan.costs.bytes_added for plan in plans)
    check_space(target, bytes_added + room_for_base(given, plans[0], target, base_weights))
    # reading the base takes longest, so all other checks come before
    hashes = _check_base(given, track)
    for name, extract in opened.items():
        differing = find_differing(extract, alone, hashes)
        refuse_differing(extract, f"{name}: {source.name}", differing, len(alone.tensors), "base-differs-compose")
        check_own_files(extract, track)
        _check_tokens(extract, given, source)
    warnings = tuple(line for each in opened.values() for line in other_computation(each, alone.config, source.name))
    beside, disputed = _find_beside(opened, given)
    state = {
        "compose": {name: [dict(record.tensors), record.plan.to_json()] for name, record in expansions.items()},
        "routing": None if routing is None else routing.settings,
        "base_weights": base_weights,
    }
    stamps = dict(given.stamps)
    for extract in opened.values():
        stamps |= extract.stamps
    # the record says where the tensors were computed, as the extracts do
    run = RunOptions(next((extract.manifest.tool.get("device", "cpu") for extract in opened.values()), "cpu"))
    with staged(target, state, stamps, overwrite=overwrite) as partial:
        contents = dict[str, Content](beside)
        for name, extract in opened.items():
            contents |= shards_of(extract, added[name].plan)
        with track("expansions", total_bytes(contents)) as advance:
            lay_out(contents, partial, base_weights, advance)
        written = write_folder(given, expansions, routing, partial, base_weights, track, run)
        if set(written.folder.tensors) != {*written.folder.manifest.base_tensors, *written.folder.manifest.planned}:
            raise CheckpointError(Problem("composed-tensors-differ", source.name))
    return Composed(
        path=target,
        base_name=base_name,
        expansions={name: len(record.plan.tensors) for name, record in expansions.items()},
        routing=routing,
        bytes_added=bytes_added,
        left_out=tuple(dict.fromkeys((*given.left_out, *written.left_out, *disputed))),
        removed=remove,
        warnings=warnings,
    )


def _plan_beside(
    opened: Mapping[str, Extract], base: Checkpoint, base_name: str, revision: str | None
) -> dict[str, ExpansionRecord]:
    """Plan each extract once more, under the name that it gets and beside this base."""
    added = {}
    for name, extract in opened.items():
        made = extract.manifest.plan
        request = replace(made.request, name=name)
        plan = plan_expansion(Base(base, made.facts), request, name=base_name, revision=revision)
        added[name] = _rename(extract.manifest.expansions[extract.manifest.name], plan)
    return added


def _check_tokens(extract: Extract, given: Checkpoint, source: Source) -> None:
    """Check that new tokens fit the base's tokenizer if it is another than the one they were made for."""
    if (new := extract.manifest.plan.request.new_tokens) is None:
        return
    recorded = {file: entry.sha256 for file, entry in extract.manifest.base_files.items() if file in EXTENDED}
    with tempfile.TemporaryDirectory() as scratch:
        base = source.path
        if isinstance(given, Folder):
            # the tokenizer of an expanded folder may have the tokens of an expansion that is left out
            link_base(given, base := Path(scratch))
        if {file: hash_file(base / file) for file in EXTENDED if (base / file).is_file()} != recorded:
            # torch takes seconds to import
            from scale_surgery.running.new_tokens import check_new_tokens
            from scale_surgery.running.tokenizer import load_tokenizer

            check_new_tokens(base, load_tokenizer(base, RunOptions()), new, extract.manifest.plan.sizes.embedded)


def _find_beside(opened: Mapping[str, Extract], given: Checkpoint) -> tuple[dict[str, Content], tuple[str, ...]]:
    """Find the files of extracts that are neither tensors nor code, such as a chat template.

    Those that the base has, or of which two extracts have different ones, are left out, and model cards and logs.
    """
    found = defaultdict[str, list[Path]](list)
    for extract in opened.values():
        for file in extract.side_files:
            if file not in made_files(extract):
                found[file].append(extract.path / name_in_extract(file))
    left = tuple(
        file
        for file, places in found.items()
        if file == CARD_FILE
        or file.startswith(f"{TRAINING_FOLDER}/")
        or file in given.side_files
        or len(set(map(hash_file, places))) > 1
    )
    return {file: places[0] for file, places in found.items() if file not in left}, left


def _check_base(given: Checkpoint, track: Track) -> Mapping[str, str]:
    """Check a base, or a folder, and return the hashes of the base's tensors."""
    if not isinstance(given, Folder):
        check_clashes(given)
        return hash_base(given, track)
    refuse_damaged(given, track)
    return given.manifest.base_hashes


def check_beside(plans: Iterable[Plan]) -> None:
    """Refuse expansions that cannot run beside others; each is named."""
    problems, plans = list[Problem](), list(plans)
    with_tokens = [plan.request.name for plan in plans if plan.widths.new_tokens]
    if len(with_tokens) > 1:
        problems.append(Problem("expansions-add-tokens", "expansions", names=with_tokens))
    for plan in plans:
        name = plan.request.name
        refuse(plan.method, "compose", name)
        if plan.architecture.own_code:
            problems.append(Problem("own-code-composed", name))
        problems += [problem.within(name) for problem in path_problems_of(plan)]
    if problems:
        raise PlanError(*problems)


def routing_beside(given: Checkpoint, expansions: int, routing: Router | None = None) -> Router | None:
    """Return the router of a folder with this number of expansions: as asked for, as before, or all paths alike."""
    before = given.manifest if isinstance(given, Folder) else None
    known = None if before is None else before.routing
    if routing is None and (before is None or len(before.expansions) != expansions):
        # weights of single paths say nothing of others
        routing = known.without_prior() if known else PosteriorRouter() if expansions > 1 else None
    routing = routing or known
    if routing is None:
        return None
    routing = routing.for_expansions(expansions)
    if before is not None and (problems := routing.problems(expansions)):
        reasons = [Problem("other-program", error=problem.removesuffix(".")) for problem in problems]
        raise CheckpointError(Problem("router-for-others", before.base_name, *reasons, count=expansions))
    return routing


def _open(source: Source, remove: Sequence[str]) -> Checkpoint:
    """Open a base model; or an expanded folder without the expansions to remove, which may be damaged."""
    path = source.path
    if not (path / MANIFEST_FILE).is_file():
        if remove:
            raise PlanError(Problem("remove-from-base", "remove", model=source.name))
        base = open_checkpoint(path)
        refuse_linked(base)
        return base
    manifest = read_manifest(path)
    known = list(manifest.expansions)
    if unknown := [name for name in remove if name not in known]:
        raise PlanError(*(Problem("remove-unknown", "remove", name=name, known=known) for name in unknown))
    left = tuple(f"{SHARD_STEM}{name}-" for name in remove)
    folder = with_record(open_checkpoint(path, without=left), manifest)
    refuse_fused(folder)
    refuse_linked(folder)
    if not remove:
        return folder
    routing = manifest.routing.without_prior() if manifest.routing else None
    kept = folder.only(*(name for name in known if name not in remove))
    return replace(kept, manifest=replace(kept.manifest, routing=routing))


def _open_extracts(extracts: Mapping[str, str | Path] | Sequence[str | Path] | str | Path) -> dict[str, Extract]:
    """Open extracts by the names that they get; the extract of a `default` expansion is named after its folder."""
    given = list(extracts.values()) if isinstance(extracts, Mapping) else listed(extracts)
    if others := [path for path in given if not isinstance(path, str | Path)]:
        raise PlanError(*(Problem("extract-no-path", "extracts", value=value) for value in others))
    opened = [open_extract(path) for path in given]
    names = list(extracts) if isinstance(extracts, Mapping) else [_name_of(extract) for extract in opened]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise PlanError(*(Problem("extract-name-twice", "names", name=name) for name in twice))
    return dict(zip(names, opened, strict=True))


def _name_of(extract: Extract) -> str:
    name = extract.manifest.name
    # names of folders often have hyphens and dots, and may begin with a digit
    return re.sub(r"\W|^(?=\d)", "_", Path(extract.name).name) if name == DEFAULT_NAME else name


def _check_names(wanted: Mapping[str, Extract], kept: Mapping[str, ExpansionRecord]) -> None:
    problems = [] if wanted or kept else [Problem("expansions-none", "extracts")]
    known = list(kept)
    for name in wanted:
        try:
            check_name(name, known)
        except PlanError as error:
            problems += error.problems
        known.append(name)
    if problems:
        raise PlanError(*problems)


def _rename(record: ExpansionRecord, plan: Plan) -> ExpansionRecord:
    """Return the record of an expansion under the name in its new plan."""
    began, trained = (
        None if hashes is None else {renamed(tensor, plan.request.name): digest for tensor, digest in hashes.items()}
        for hashes in (record.tensors, record.trained)
    )
    return replace(record, plan=plan, tensors=began or {}, trained=trained)
