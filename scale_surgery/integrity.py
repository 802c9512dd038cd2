"""What files alone can show of an expanded checkpoint: base bytes, expansion tensors, code, and zeros."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scale_surgery import modeling
from scale_surgery.checkpoint import Checkpoint, Progress, no_progress, read_tensor
from scale_surgery.families import Family, get_family
from scale_surgery.manifest import Manifest, hash_file, hash_tensors

EXPANSION_BLOCKS = ("w12", "w21", "w22", "up_weight", "up_bias")


@dataclass(frozen=True)
class Integrity:
    """Problems found in files, by kind; an empty tuple means that the check passed.

    Attributes:
        base: Base tensors and files that are not what they were, or not the given base's.
        structure: Expansion tensors that are missing, unexpected, of a wrong shape, or where no W12 may be.
        code: Code files that differ from this release's.
        nonzero: Tensors that must be zero for the output to be the base's: W12 and the head's up part.
        trained: Expansion tensors that changed since the expansion.
        base_tensors: Number of base tensors compared.
        base_bytes: Their bytes.
    """

    base: tuple[str, ...]
    structure: tuple[str, ...]
    code: tuple[str, ...]
    nonzero: tuple[str, ...]
    trained: tuple[str, ...]
    base_tensors: int
    base_bytes: int


def is_expansion_tensor(name: str) -> bool:
    """Whether a tensor's name is that of an expansion tensor."""
    return name.rsplit(".", 1)[-1] in EXPANSION_BLOCKS


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
    planned = {tensor["name"]: tensor for tensor in manifest.plan["tensors"]}
    present = [name for name in manifest.base_tensors if name in checkpoint.tensors]
    hashes = hash_tensors(checkpoint, present, advance)
    found = [name for name in planned if name in checkpoint.tensors]
    expansion = hash_tensors(checkpoint, found, advance)
    return Integrity(
        base=(
            *_tensor_problems(manifest, hashes, base, advance),
            *_file_problems(checkpoint.path, manifest, advance),
        ),
        structure=tuple(_structure_problems(checkpoint, manifest, planned)),
        code=tuple(_code_problems(checkpoint.path, get_family(manifest.plan["family"]))),
        nonzero=tuple(_nonzero(checkpoint)),
        trained=tuple(name for name, digest in expansion.items() if manifest.expansion_tensors.get(name) != digest),
        base_tensors=len(manifest.base_tensors),
        base_bytes=sum(checkpoint.tensors[name].bytes for name in present),
    )


def bytes_to_check(checkpoint: Checkpoint, manifest: Manifest, base: Checkpoint | None) -> int:
    """Bytes that `check_files` reads, for a progress bar."""
    total = sum(info.bytes for info in checkpoint.tensors.values())
    total += sum(file.bytes for file in manifest.base_files.values() if file.stored_as is not None)
    return total + (sum(info.bytes for info in base.tensors.values()) if base is not None else 0)


def _tensor_problems(
    manifest: Manifest, hashes: Mapping[str, str], base: Checkpoint | None, advance: Progress
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
    for name in sorted(set(given) | set(hashes)):
        if given.get(name) != hashes.get(name):
            has, wants = hashes.get(name, "no such tensor")[:16], given.get(name, "no such tensor")[:16]
            problems.append(f"{name}: {has}, expected {wants} as in the base model {base.path}.")
    return problems


def _file_problems(path: Path, manifest: Manifest, advance: Progress) -> list[str]:
    problems = []
    for name, file in manifest.base_files.items():
        if file.stored_as is None:
            continue
        stored = path / file.stored_as
        if not stored.is_file():
            problems.append(f"{file.stored_as}: file is missing, it holds the base's {name}.")
        elif hash_file(stored, advance) != file.sha256:
            problems.append(f"{file.stored_as}: bytes differ from the base's {name}.")
    return problems


def _structure_problems(
    checkpoint: Checkpoint, manifest: Manifest, planned: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    problems = []
    for name, tensor in planned.items():
        info = checkpoint.tensors.get(name)
        if info is None:
            problems.append(f"{name}: expansion tensor is missing.")
        elif list(info.shape) != list(tensor["shape"]):
            problems.append(f"{name}: shape {info.shape}, expected {tuple(tensor['shape'])} from the plan.")
    for name in checkpoint.tensors:
        if name not in planned and name not in manifest.base_tensors:
            problems.append(_unexpected(checkpoint, name))
    if checkpoint.config.get("scale_surgery") != manifest.plan["specs"]:
        problems.append("config.json: its key scale_surgery differs from the plan in surgery.json.")
    return problems


def _unexpected(checkpoint: Checkpoint, name: str) -> str:
    if not name.endswith(".w12"):
        return f"{name}: no such tensor in the plan or in the base model."
    count = int(read_tensor(checkpoint, name).count_nonzero())
    return f"{name}: this layer's W12 is frozen at zero and must not exist, found one with {count} non-zero entries."


def _code_problems(path: Path, family: Family) -> list[str]:
    problems = []
    for file in family.code_files:
        if not (path / file).is_file():
            problems.append(f"{file}: code file is missing.")
        elif hash_file(path / file) != modeling.code_hash(file):
            problems.append(f"{file}: differs from this release's file; read it before you trust it.")
    return problems


def _nonzero(checkpoint: Checkpoint) -> list[str]:
    """W12 and the head's up part, where they hold anything but zeros."""
    family = get_family(str(checkpoint.config["model_type"]).removeprefix("scale_"))
    heads = ("lm_head.up_weight", f"{family.head}.up_weight")
    must_be_zero = [name for name in checkpoint.tensors if name.endswith(".w12") or name in heads]
    problems = []
    for name in must_be_zero:
        count = int(read_tensor(checkpoint, name).count_nonzero())
        if count:
            problems.append(f"{name}: {count} of {checkpoint.tensors[name].elements} entries are not zero.")
    return problems
