"""What files alone can show of an expanded checkpoint: base bytes, expansion tensors, code, and zeros."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from scale_surgery import modeling
from scale_surgery.checkpoint.folder import CONFIG_FILE, Checkpoint, read_json, read_tensor
from scale_surgery.checkpoint.hashes import hash_file, hash_tensors
from scale_surgery.checkpoint.headers import TensorInfo
from scale_surgery.planning.plan import Plan
from scale_surgery.planning.tensors import TensorPlan
from scale_surgery.progress import Progress, no_progress
from scale_surgery.running.tokenizer import TOKENIZER_CONFIG_FILE
from scale_surgery.surgery.config import config_problems
from scale_surgery.surgery.joining import joined_tensors
from scale_surgery.surgery.parts import described_parts, hash_parts, part_readers
from scale_surgery.surgery.record import Manifest
from scale_surgery.surgery.renumbered import hash_stored


@dataclass(frozen=True)
class Integrity:
    """Problems found in files, by kind; an empty tuple means that the check passed.

    Attributes:
        base: Base tensors and files that are not what they were, or not the given base's.
        structure: Expansion tensors that are missing, unexpected, of a wrong shape, or where no W12 may be.
        config: Keys of config.json that are not what the expansion wrote.
        code: Code files that are missing, unknown, or not what the expansion wrote.
        foreign_code: Code files that the expansion wrote, by another release than this.
        unreleased_code: Code files whose bytes are those of no release.
        fingerprint: sha256 over what the model computes with: tensors, router and code.
        is_loadable: Whether every tensor that the model needs is there in its shape.
        nonzero: Tensors that must be zero for the output to be the base's: W12 and the head's up part.
        trained: Expansion tensors that changed since the expansion.
        base_tensors: Number of base tensors compared.
        base_bytes: Their bytes.
    """

    base: tuple[str, ...]
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


def check_files(
    checkpoint: Checkpoint, manifest: Manifest, base: Checkpoint | None, advance: Progress = no_progress
) -> Integrity:
    """Check an expanded checkpoint against its manifest, and against a base model where one is given.

    Args:
        checkpoint: The expanded checkpoint.
        manifest: Its surgery.json.
        base: The base model to compare with, or None to rely on the recorded hashes.
        advance: Called with the bytes done.

    Returns:
        Every problem, each naming its tensor or file.
    """
    planned = {tensor.name: tensor for tensor in manifest.plan.tensors}
    parts = described_parts(checkpoint, manifest)
    hashes = hash_parts(checkpoint, manifest, manifest.base_tensors, advance)
    expansion = hash_parts(checkpoint, manifest, planned, advance)
    damaged = _damaged(checkpoint, manifest, planned)
    return Integrity(
        base=(
            *_tensor_problems(checkpoint, manifest, hashes, base, advance),
            *_file_problems(checkpoint, manifest, advance),
        ),
        structure=(*damaged, *_unexpected_tensors(checkpoint, manifest, planned)),
        config=tuple(_config_problems(checkpoint, manifest, base)),
        code=tuple(_code_problems(checkpoint, manifest)),
        foreign_code=tuple(file for file, digest in manifest.code.items() if digest != modeling.code_hash(file)),
        unreleased_code=tuple(_unreleased(checkpoint)),
        fingerprint=_fingerprint(manifest, hashes | expansion),
        is_loadable=not damaged and len(hashes) == len(manifest.base_tensors),
        nonzero=tuple(_changed_guards(checkpoint, manifest, advance)),
        trained=tuple(name for name, digest in expansion.items() if manifest.expansion_tensors.get(name) != digest),
        base_tensors=len(manifest.base_tensors),
        base_bytes=sum(parts[name].bytes for name in hashes),
    )


def _fingerprint(manifest: Manifest, hashes: Mapping[str, str]) -> str:
    routing = None if manifest.routing is None else manifest.routing["settings"]
    text = json.dumps([hashes, routing, manifest.fused is None, manifest.code], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def bytes_to_check(checkpoint: Checkpoint, manifest: Manifest, base: Checkpoint | None) -> int:
    """Bytes that `check_files` reads, for a progress bar."""
    total = sum(info.bytes for info in checkpoint.tensors.values())
    total += sum(file.bytes for file in manifest.base_files.values() if file.stored_as is not None)
    # each copy is made again to be compared
    total += sum(tensor.bytes for tensor in manifest.plan.method.guards(manifest.plan) if tensor.init == "copy")
    return total + (sum(info.bytes for info in base.tensors.values()) if base is not None else 0)


def _tensor_problems(
    checkpoint: Checkpoint,
    manifest: Manifest,
    hashes: Mapping[str, str],
    base: Checkpoint | None,
    advance: Progress,
) -> list[str]:
    problems = []
    for name, digest in manifest.base_tensors.items():
        if name not in hashes:
            problems.append(f"{name}: base tensor is missing.")
        elif hashes[name] != digest:
            problems.append(f"{name}: sha256 {hashes[name][:16]}..., expected {digest[:16]}... from surgery.json.")
    if base is None:
        return problems
    given = hash_tensors(base, list(base.tensors), advance)
    parts = described_parts(checkpoint, manifest)
    for name in sorted(set(given) | set(hashes)):
        has, wants = _described(parts, hashes, name), _described(base.tensors, given, name)
        if has != wants:
            problems.append(f"{name}: {has}, expected {wants} as in the base model {base.path}.")
    return problems


def _described(tensors: Mapping[str, TensorInfo], hashes: Mapping[str, str], name: str) -> str:
    if name not in hashes:
        return "no such tensor"
    info = tensors[name]
    return f"{info.dtype} {list(info.shape)} with sha256 {hashes[name][:16]}..."


def _file_problems(checkpoint: Checkpoint, manifest: Manifest, advance: Progress) -> list[str]:
    problems = []
    # the bytes of a fused model's shards are known by the tensors that they were
    joined = manifest.joined_shards
    for name, file in manifest.base_files.items():
        if file.stored_as in joined:
            continue
        if file.stored_as is None:
            if hashlib.sha256(manifest.replaced[name].encode("utf-8")).hexdigest() != file.sha256:
                problems.append(f"surgery.json: its text of the base's {name} is not what it was.")
        elif not (checkpoint.path / file.stored_as).is_file():
            problems.append(f"{file.stored_as}: file is missing, it holds the base's {name}.")
        elif hash_stored(checkpoint.path, manifest, [file.stored_as], advance)[file.stored_as] != file.sha256:
            problems.append(f"{file.stored_as}: bytes differ from the base's {name}.")
    stored = {file.stored_as for file in manifest.base_files.values()}
    if manifest.fused is not None:
        return problems
    shards = {checkpoint.tensors[name].file for name in manifest.base_tensors if name in checkpoint.tensors}
    problems += [f"{shard}: holds base tensors and is not among the base's files." for shard in sorted(shards - stored)]
    return problems


def _damaged(checkpoint: Checkpoint, manifest: Manifest, planned: Mapping[str, TensorPlan]) -> list[str]:
    """Expansion tensors, and joined ones that they lie in, that are missing or of a wrong shape."""
    problems = []
    joined = list(joined_tensors(manifest)) if manifest.fused is not None else []
    inside = {name for item in joined for name in item.pieces.values()}
    shapes = {name: tensor.shape for name, tensor in planned.items() if name not in inside}
    for name, shape in [*shapes.items(), *((item.name, item.shape) for item in joined)]:
        info = checkpoint.tensors.get(name)
        if info is None:
            problems.append(f"{name}: expansion tensor is missing.")
        elif info.shape != shape:
            problems.append(f"{name}: shape {info.shape}, expected {shape} from the plan.")
    return problems


def _unexpected_tensors(checkpoint: Checkpoint, manifest: Manifest, planned: Mapping[str, TensorPlan]) -> list[str]:
    known = {*planned, *manifest.base_tensors}
    return [_unexpected(checkpoint, name) for name in checkpoint.tensors if name not in known]


def _config_problems(checkpoint: Checkpoint, manifest: Manifest, base: Checkpoint | None) -> list[str]:
    """Compare config.json with what `expand` makes of the base's."""
    problems = config_problems(manifest, checkpoint.config)
    problems += _tokenizer_problems(checkpoint, manifest)
    if base is not None:
        recorded = json.loads(manifest.replaced[CONFIG_FILE])
        keys = sorted(key for key in {*recorded, *base.config} if recorded.get(key) != base.config.get(key))
        problems += [f"config.json: {key} differs from that of the base model {base.path}." for key in keys]
    return problems


def _tokenizer_problems(checkpoint: Checkpoint, manifest: Manifest) -> list[str]:
    """What the tokenizer's config names beside the class that the expansion wrote; it can name code to run."""
    stored = manifest.base_files.get(TOKENIZER_CONFIG_FILE)
    file = checkpoint.path / TOKENIZER_CONFIG_FILE
    if not file.is_file() or (stored is not None and stored.stored_as is not None):
        return []  # compared as a file
    wants = json.loads(manifest.replaced.get(TOKENIZER_CONFIG_FILE, "{}"))
    has = read_json(file)
    differing = sorted(key for key in {*has, *wants} - {"tokenizer_class"} if has.get(key) != wants.get(key))
    return [f"{TOKENIZER_CONFIG_FILE}: {key} is not what the base's says." for key in differing]


def _unexpected(checkpoint: Checkpoint, name: str) -> str:
    if not name.endswith(".w12"):
        return f"{name}: no such tensor in the plan or in the base model."
    count = int(read_tensor(checkpoint, name).count_nonzero())
    return f"{name}: this layer's W12 is frozen at zero and must not exist, found one with {count} non-zero entries."


def _code_problems(checkpoint: Checkpoint, manifest: Manifest) -> list[str]:
    problems, ours = [], manifest.plan.code_files
    for file in ours:
        if not (checkpoint.path / file).is_file():
            problems.append(f"{file}: code file is missing.")
        elif hash_file(checkpoint.path / file) != manifest.code.get(file):
            problems.append(f"{file}: is not the code that the expansion wrote. Read it before you trust it.")
    known = {*ours, *(file.stored_as for file in manifest.base_files.values())}
    unknown = [file for file in checkpoint.side_files if file.endswith(".py") and file not in known]
    return problems + [f"{file}: unknown code file. Read it before you trust it." for file in unknown]


def _unreleased(checkpoint: Checkpoint) -> Iterator[str]:
    """Code files that no release of this program wrote, whatever surgery.json says of them."""
    released = modeling.released_hashes()
    for file in checkpoint.side_files:
        if file.endswith(".py") and hash_file(checkpoint.path / file) not in released.get(file, ()):
            yield file


def _changed_guards(checkpoint: Checkpoint, manifest: Manifest, advance: Progress) -> list[str]:
    """Tensors that keep the output the base's as long as they are as they began, and are not, a line each."""
    guards = manifest.plan.method.guards(manifest.plan)
    copies = [tensor for tensor in guards if tensor.init == "copy"]
    return [*_not_constant(checkpoint, manifest, guards), *_not_copies(checkpoint, manifest.plan, copies, advance)]


def _not_copies(checkpoint: Checkpoint, plan: Plan, copies: Sequence[TensorPlan], advance: Progress) -> Iterator[str]:
    if copies:
        from scale_surgery.surgery.initialise import altered_copies

        yield from altered_copies(plan, copies, checkpoint, advance)


def _not_constant(checkpoint: Checkpoint, manifest: Manifest, guards: Sequence[TensorPlan]) -> Iterator[str]:
    values = {"zero": 0, "mute": manifest.plan.architecture.mute_gain}
    readers, planned = part_readers(checkpoint, manifest), {tensor.name for tensor in manifest.plan.tensors}
    wanted = {tensor.name: values[tensor.init] for tensor in guards if tensor.init in values}
    # a W12 that no plan knows writes into the base stream as well
    wanted |= {name: 0 for name in readers if name.endswith(".w12") and name not in planned}
    for name, value in wanted.items():
        if name in readers:
            found = readers[name]()
            if count := int((found != value).count_nonzero()):
                yield f"{name}: {count} of {found.numel()} entries are not {value or 'zero'}."
