"""What a composed folder holds, from its records alone: for inspect, report and the model card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scale_surgery.composition.members import manifest_of
from scale_surgery.composition.record import Mixing, read_composition
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
        base_name: Hub id or folder name of the base model.
        base_revision: Commit of the Hub repository, where known.
        expansions: Its expansions by name, in the order of the paths.
        mixing: How the paths are mixed.
        verification: What the last verification found, as plain JSON values, or None.
    """

    base_name: str
    base_revision: str | None
    expansions: Mapping[str, MemberSummary]
    mixing: Mixing
    verification: Mapping[str, Any] | None

    @property
    def paths(self) -> str:
        """The paths in one line."""
        return f"{len(self.expansions) + 1}: the base, {', '.join(self.expansions)}"

    @property
    def verified(self) -> str:
        """Date and result of the last verification in one line."""
        if self.verification is None:
            return "never"
        return f"{'passed' if self.verification['passed'] else 'FAILED'} {self.verification['date']}"


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
    return CompositionSummary(
        base_name=record.base_name,
        base_revision=record.base_revision,
        expansions={name: _summarise(manifest_of(path, name)) for name in record.names},
        mixing=record.mixing,
        verification=record.verification,
    )


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
