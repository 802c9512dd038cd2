"""Check the files of an expanded checkpoint: base bytes, expansion tensors, code, and zeros."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.checkpoint.hashes import hash_file, hash_tensors
from scale_surgery.checkpoint.headers import TensorInfo
from scale_surgery.checkpoint.names import CONFIG_FILE
from scale_surgery.checkpoint.reading import differing_keys, parse_json
from scale_surgery.errors import counted
from scale_surgery.folder.check import added_files, bytes_of_model, check_integrity
from scale_surgery.folder.folder import Folder
from scale_surgery.folder.parts import described_parts, part_readers
from scale_surgery.folder.record import Manifest
from scale_surgery.planning.exported import is_ours
from scale_surgery.planning.plan import Plan
from scale_surgery.planning.tensors import TensorPlan
from scale_surgery.progress import Progress, no_progress
from scale_surgery.running.tokenizer import ASKING_FILES, MORE_TEMPLATES


@dataclass(frozen=True)
class Integrity:
    """Problems found in files, by kind; an empty tuple means that the check passed.

    Attributes:
        base: Base tensors and files that changed, or that differ from the given base.
        is_other_base: True if the given base is not the one inside, by tensors or config, and that one is unchanged.
        structure: Expansion tensors that are missing, unexpected, of a wrong shape, or a W12 at a forbidden place.
        config: Keys of config.json that differ from those that the expansion wrote.
        code: Code files that are missing, unknown, or differ from those that the expansion wrote.
        foreign_code: Code files written by another release of this program.
        unreleased_code: Code files that differ from those of this release, by their bytes.
        fingerprint: sha256 over tensors, router and code, the inputs of the computation.
        is_loadable: True if every tensor that the model needs is present in its shape.
        nonzero: Tensors that must be zero for the output to be the base's: W12 and the head's up part.
        trained: Expansion tensors that changed since the expansion.
        base_tensors: Number of compared base tensors.
        base_bytes: Their bytes.
    """

    base: tuple[str, ...]
    is_other_base: bool
    structure: tuple[str, ...]
    config: tuple[str, ...]
    code: tuple[str, ...]
    foreign_code: tuple[str, ...]
    unreleased_code: tuple[str, ...]
    fingerprint: str
    is_loadable: bool
    nonzero: tuple[str, ...]
    trained: tuple[str, ...]
    base_tensors: int
    base_bytes: int


def check_files(folder: Folder, base: Checkpoint | None, advance: Progress = no_progress) -> Integrity:
    """Check an expanded folder against its surgery.json, and against a base model if one is given."""
    manifest = folder.manifest
    parts = described_parts(folder)
    damage = check_integrity(folder, advance)
    expansion = damage.expansion
    began = {name: digest for recorded in manifest.expansions.values() for name, digest in recorded.tensors.items()}
    differing = [] if base is None else base_differences(parts, damage.hashes, base, advance)
    base_problems = () if base is None or damage.base else other_base(folder, base, differing)
    other_keys = [] if base is None else base_config_differences(manifest.replaced[CONFIG_FILE], base)
    return Integrity(
        base=(*map(str, damage.base), *base_problems, *differing),
        is_other_base=bool(base_problems or (other_keys and not damage.base)),
        structure=tuple(map(str, damage.structure)),
        config=(*map(str, damage.config), *other_keys),
        code=tuple(map(str, damage.code)),
        foreign_code=manifest.foreign_code,
        unreleased_code=tuple(_unreleased(folder)),
        fingerprint=fingerprint_of(manifest, {**damage.hashes, **expansion}),
        is_loadable=not damage.missing and len(damage.hashes) == len(manifest.base_tensors),
        nonzero=tuple(_changed_guards(folder, advance)),
        trained=tuple(name for name, digest in expansion.items() if began.get(name) != digest),
        base_tensors=len(manifest.base_tensors),
        base_bytes=sum(parts[name].bytes for name in damage.hashes),
    )


def fingerprint_of(manifest: Manifest, hashes: Mapping[str, str]) -> str:
    """Return the sha256 of what a certificate is about: tensors by their hashes, router, form and code."""
    routing = None if manifest.routing is None else manifest.routing.settings
    text = json.dumps([hashes, routing, manifest.fused is None, manifest.code], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def bytes_to_check(folder: Folder, base: Checkpoint | None) -> int:
    """Return the number of bytes that `check_files` reads, for a progress bar."""
    total = bytes_of_model(folder)
    # each copy is made again for the comparison
    guards = (tensor for plan in folder.manifest.plans.values() for tensor in plan.guards)
    total += sum(tensor.bytes for tensor in guards if tensor.init == "copy")
    return total + (sum(info.bytes for info in base.tensors.values()) if base is not None else 0)


def base_differences(
    tensors: Mapping[str, TensorInfo], hashes: Mapping[str, str], base: Checkpoint, advance: Progress = no_progress
) -> list[str]:
    """Return the base tensors of a folder that differ from a given base, a line each."""
    given = hash_tensors(base, list(base.tensors), advance)
    problems = []
    for name in sorted(set(given) | set(hashes)):
        has, wants = _described(tensors, hashes, name), _described(base.tensors, given, name)
        if has != wants:
            problems.append(f"{name}: {has}, expected {wants} as in the base model {base.path}.")
    return problems


def other_base(folder: Folder, base: Checkpoint, differing: Sequence[str]) -> tuple[str, ...]:
    """Return a problem if the given base is not the folder's base, otherwise nothing."""
    if not differing:
        return ()
    count, all_of_them = len(differing), len({*folder.manifest.base_tensors, *base.tensors})
    difference = f"{count} of {counted(all_of_them, 'tensor')} {'is another' if count == 1 else 'are others'}"
    return (
        f"{base.path}: is not the base of {folder.path}, {difference}. Give the one that it was made on, "
        f"{folder.manifest.base_name}, or leave --base out.",
    )


def _described(tensors: Mapping[str, TensorInfo], hashes: Mapping[str, str], name: str) -> str:
    if name not in hashes:
        return "no such tensor"
    info = tensors[name]
    return f"{info.dtype} {list(info.shape)} with sha256 {hashes[name][:16]}..."


def asking_warnings(folder: Folder) -> list[str]:
    """Return warnings about files of prompting and generation that the base does not have, a line each."""
    templates = [name for name in folder.side_files if name.startswith(MORE_TEMPLATES)]
    return [
        f"{name}: the base has none. It changes how the model is asked, and no promise is about it."
        for name in added_files(folder, [*ASKING_FILES, *templates])
    ]


def base_config_differences(recorded: str, base: Checkpoint) -> list[str]:
    """Return the keys of a recorded config.json that differ in a given base, a line each."""
    keys = differing_keys(parse_json(recorded), base.config)
    return [f"config.json: {key} differs from that of the base model {base.path}." for key in keys]


def _unreleased(folder: Folder) -> Iterator[str]:
    """Generate the code files that differ from those of this release, regardless of surgery.json."""
    facts = folder.manifest.first_plan.architecture
    for file in folder.side_files:
        if file.endswith(".py") and not is_ours(file, hash_file(folder.path / file), facts):
            yield file


def _changed_guards(folder: Folder, advance: Progress) -> list[str]:
    """Return the guards (see `Method.guards`) that changed since the expansion, a line each."""
    problems: list[str] = []
    for plan in folder.manifest.plans.values():
        guards = plan.guards
        copies = [tensor for tensor in guards if tensor.init == "copy"]
        problems += _not_constant(folder, plan, guards)
        problems += _not_copies(folder, plan, copies, advance)
    return list(dict.fromkeys(problems))


def _not_copies(folder: Folder, plan: Plan, copies: Sequence[TensorPlan], advance: Progress) -> Iterator[str]:
    if copies:
        from scale_surgery.tensors.initialise import altered_copies

        yield from altered_copies(plan, copies, folder, advance)


def _not_constant(folder: Folder, plan: Plan, guards: Sequence[TensorPlan]) -> Iterator[str]:
    values = {"zero": 0, "mute": plan.architecture.mute_gain}
    readers, planned = part_readers(folder), folder.manifest.planned
    wanted = {tensor.name: values[tensor.init] for tensor in guards if tensor.init in values}
    # a W12 without a plan also writes into the base stream
    wanted |= {name: 0 for name in readers if name.endswith(".w12") and name not in planned}
    for name, value in wanted.items():
        if name in readers:
            tensor = readers[name]()
            if count := int((tensor != value).count_nonzero()):
                yield f"{name}: {count} of {tensor.numel()} entries are not {value or 'zero'}."
