"""What a composed folder holds, from its records alone: for inspect, report and the model card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.files import plain_json
from scale_surgery.checkpoint.names import COMPOSED_FILE
from scale_surgery.composition.members import manifest_of
from scale_surgery.composition.record import Composition, Mixing, read_composition
from scale_surgery.errors import CheckpointError
from scale_surgery.evidence.promises import Promise
from scale_surgery.surgery.record import Manifest


@dataclass(frozen=True)
class MemberSummary:
    """An expansion in a composed folder.

    Attributes:
        method: "scale" or "grow".
        variant: What trains, such as "preserve" or "adapt".
        layers: Expanded layers, by their numbers in the base.
        tensors: Number of its tensors.
        parameters: Parameters in them.
        bytes: Their bytes.
        runs: What is recorded of its training runs.
    """

    method: str
    variant: str
    layers: tuple[int, ...]
    tensors: int
    parameters: int
    bytes: int
    runs: tuple[Mapping[str, Any], ...]

    @property
    def steps(self) -> int:
        """Steps of all runs."""
        return sum(int(run.get("steps") or 0) for run in self.runs)


@dataclass(frozen=True)
class CompositionSummary:
    """What a composed folder holds.

    Attributes:
        name: What the folder is called.
        base_name: Hub id or folder name of the base model.
        base_revision: Commit of the Hub repository, where known.
        expansions: Its expansions by name, in the order of the paths.
        mixing: How the paths are mixed.
        verified: Date and result of the last verification, or "never".
        promises: What that found.
        required: Promises that decided it.
    """

    name: str
    base_name: str
    base_revision: str | None
    expansions: Mapping[str, MemberSummary]
    mixing: Mixing
    verified: str
    promises: tuple[Promise, ...]
    required: tuple[str, ...]

    @property
    def paths(self) -> str:
        """The paths in one line."""
        return f"{len(self.expansions) + 1}: the base, {', '.join(self.expansions)}"


def summarise_composition(path: Path) -> CompositionSummary:
    """Read the records of a composed folder.

    Args:
        path: The folder.

    Returns:
        What it holds; no tensor was read.

    Raises:
        CheckpointError: If this is no composed folder, or a record of it is incomplete.
    """
    _, record = read_composition(path)
    try:
        verified, promises, required = _verification(record)
    except (LookupError, TypeError) as error:
        raise CheckpointError(
            f"{path / COMPOSED_FILE}: verification is incomplete ({error}). Run scale-surgery verify again."
        ) from error
    return CompositionSummary(
        name=path.resolve().name,
        base_name=record.base_name,
        base_revision=record.base_revision,
        expansions={name: _summarise(manifest_of(path, name)) for name in record.names},
        mixing=record.mixing,
        verified=verified,
        promises=promises,
        required=required,
    )


def _verification(record: Composition) -> tuple[str, tuple[Promise, ...], tuple[str, ...]]:
    """Date and result, promises, and those that decide, as composed.json has them."""
    found = record.verification
    if found is None:
        return "never", (), ()
    promises = tuple(Promise(**{**own, "problems": tuple(own["problems"])}) for own in found["promises"])
    said = f"{'passed' if found['passed'] else 'FAILED'} {found['date']}"
    is_other = found["mixing"] != plain_json(asdict(record.mixing))
    said += "; the router's numbers changed since" if is_other else ""
    return said, promises, tuple(found["required"])


def _summarise(manifest: Manifest) -> MemberSummary:
    plan = manifest.plan
    return MemberSummary(
        method=plan.method.name,
        variant=plan.variant,
        layers=plan.layers,
        tensors=len(plan.tensors),
        parameters=sum(tensor.elements for tensor in plan.tensors),
        bytes=sum(tensor.bytes for tensor in plan.tensors),
        runs=tuple(manifest.training),
    )
