"""Which promises a composed folder keeps: see `path_promises`."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from scale_surgery import modeling
from scale_surgery.checkpoint.expansions import renamed
from scale_surgery.checkpoint.files import write_json
from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.checkpoint.hashes import hash_file
from scale_surgery.checkpoint.names import COMPOSED_FILE, CONFIG_FILE, EXTRACT_FILE
from scale_surgery.composition.intact import Damage, bytes_to_check, find_damage
from scale_surgery.composition.members import manifest_of
from scale_surgery.composition.record import Composition, folder_of, read_composition
from scale_surgery.evidence.integrity import asking_warnings, base_config_differences, base_differences, other_base
from scale_surgery.evidence.path_promises import judge_composed
from scale_surgery.evidence.verification import OTHER_BASE, Verification, circumstances, decide, says_more
from scale_surgery.progress import Progress, Track
from scale_surgery.running.options import Probes, RunOptions
from scale_surgery.surgery.parts import link_files

COMPOSED = "composed"


def verify_composed(
    path: Path,
    given: Checkpoint | None,
    probes: Probes | None,
    required: tuple[str, ...],
    run: RunOptions,
    track: Track,
    *,
    record: bool,
) -> Verification:
    """Find out which promises hold for a composed folder; arguments are those of `verify`.

    Raises:
        CheckpointError: If this is no composed folder, or it or its base cannot be read.
    """
    checkpoint, written = read_composition(path)
    total = bytes_to_check(checkpoint, written)
    total += 0 if given is None else sum(info.bytes for info in given.tensors.values())
    with track("bytes", total) as advance:
        inside = find_damage(checkpoint, written, advance)
        damage, is_other = _beside(inside, checkpoint, written, given, advance)
    trained = _trained(checkpoint, written, damage)
    reason = "files only" if probes is None else _why_not(checkpoint, written, damage, is_other, run)
    numbers = None
    if reason is None and probes is not None:
        from scale_surgery.evidence.path_probes import probe_paths

        with tempfile.TemporaryDirectory() as folder:
            link_files(path, Path(folder), written)
            numbers = probe_paths(path, written, Path(folder) if given is None else given.path, probes, run, track)
    problems = damage.config + damage.code
    problems += () if numbers is None else numbers.load_problems + numbers.token_problems
    promises = judge_composed(checkpoint, written, damage, numbers, problems)
    decisive, passed = decide(promises, required, problems)
    result = Verification(
        path=path,
        base_name=written.base_name,
        variant=COMPOSED,
        routing=None,
        state="trained" if trained else "initial",
        trained_tensors=trained,
        promises=promises,
        required=decisive,
        problems=problems,
        warnings=(*_code_warnings(checkpoint, written), *asking_warnings(checkpoint, written)),
        numbers=None,
        passed=passed,
        fingerprint=_fingerprint(path, written, inside),
        **circumstances(),
        not_run=reason,
        mixing=written.mixing,
        mixture=numbers,
    )
    return replace(result, recorded=record and _record(path, written, result))


def _beside(
    damage: Damage, checkpoint: Checkpoint, record: Composition, given: Checkpoint | None, advance: Progress
) -> tuple[Damage, bool]:
    """What files show beside a given base too; and whether that is another one than the base inside."""
    if given is None:
        return damage, False
    there = {name: record.base_tensors[name] for name in record.base_tensors if name in checkpoint.tensors}
    differing = base_differences(checkpoint.tensors, there, given, advance)
    other = () if damage.base else other_base(checkpoint, record, given, differing)
    config = base_config_differences(record.replaced[CONFIG_FILE], given)
    found = replace(damage, base=(*damage.base, *other, *differing), config=(*damage.config, *config))
    return found, bool(other)


def _trained(checkpoint: Checkpoint, record: Composition, damage: Damage) -> int:
    """How many tensors of expansions changed since these were made; 0 where files are damaged."""
    if damage.expansions:
        return 0
    started = {
        renamed(tensor, name): digest
        for name in record.names
        for tensor, digest in manifest_of(checkpoint.path, name).expansion_tensors.items()
    }
    return sum(damage.hashes[name] != digest for name, digest in started.items())


def _why_not(
    checkpoint: Checkpoint, record: Composition, damage: Damage, is_other: bool, run: RunOptions
) -> str | None:
    """Why no model is to be run, or None where nothing speaks against it."""
    if damage.expansions or not record.base_tensors.keys() <= checkpoint.tensors.keys():
        return "tensors are missing or damaged"
    if is_other:
        return OTHER_BASE
    if run.trust_remote_code or not (damage.code or damage.config):
        return None
    return "code or config.json is not what was written"


def _code_warnings(checkpoint: Checkpoint, record: Composition) -> Iterator[str]:
    """What a user should know before running the folder's own code."""
    for file in checkpoint.side_files:
        if file.endswith(".py") and not modeling.is_ours(Path(file).name, hash_file(checkpoint.path / file)):
            origin = (
                "differs from every release of this program"
                if file in record.code or "/" in file
                else "is code of the base model, not of this program"
            )
            yield (
                f"{file}: {origin}. Read it before you let it run with trust_remote_code; without, the code of this "
                "program runs."
            )


def _fingerprint(path: Path, record: Composition, damage: Damage) -> str:
    """sha256 over what the model computes with: an extract.json has the sha256 of all that is the expansion's."""
    own = [path / folder_of(name) / EXTRACT_FILE for name in record.names]
    hashes = {file.parent.name: hash_file(file) for file in own if file.is_file()}
    content = [dict(record.base_tensors), hashes, asdict(record.mixing), dict(record.code), damage.problems]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _record(path: Path, record: Composition, result: Verification) -> bool:
    if says_more(record.verification, result):
        return True
    try:
        write_json(path / COMPOSED_FILE, asdict(replace(record, verification=result.to_json())))
    except OSError:
        # what is read-only can be verified too
        return False
    return True
