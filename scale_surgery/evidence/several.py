"""What a folder of several expansions holds, from its record alone: for inspect, report and the model card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.files import plain_json
from scale_surgery.checkpoint.names import MANIFEST_FILE
from scale_surgery.errors import CheckpointError
from scale_surgery.evidence.promises import Promise
from scale_surgery.evidence.verification import changed_since
from scale_surgery.planning.routing_specs import Routing
from scale_surgery.surgery.record import ExpansionRecord, Manifest, read_manifest


@dataclass(frozen=True)
class MemberSummary:
    """An expansion in a folder of several.

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
class ExpansionsSummary:
    """What a folder of several expansions holds.

    Attributes:
        name: What the folder is called.
        base_name: Hub id or folder name of the base model.
        base_revision: Commit of the Hub repository, where known.
        expansions: Its expansions by name, in the order of the paths.
        routing: How the paths are mixed.
        verified: Date and result of the last verification, or "never".
        promises: What that found.
        required: Promises that decided it.
    """

    name: str
    base_name: str
    base_revision: str | None
    expansions: Mapping[str, MemberSummary]
    routing: Routing
    verified: str
    promises: tuple[Promise, ...]
    required: tuple[str, ...]

    @property
    def paths(self) -> str:
        """The paths in one line."""
        return f"{len(self.expansions) + 1}: the base, {', '.join(self.expansions)}"


def summarise_expansions(path: Path) -> ExpansionsSummary:
    """Read the record of a folder of several expansions.

    Args:
        path: The folder.

    Returns:
        What it holds; no tensor was read.

    Raises:
        CheckpointError: If this is no such folder, or its record is incomplete.
    """
    manifest = read_manifest(path)
    try:
        verified, promises, required = _verification(manifest)
    except (LookupError, TypeError) as error:
        raise CheckpointError(
            f"{path / MANIFEST_FILE}: verification is incomplete ({error}). Run scale-surgery verify again."
        ) from error
    return ExpansionsSummary(
        name=path.resolve().name,
        base_name=manifest.base_name,
        base_revision=manifest.base_revision,
        expansions={name: _summarise(own) for name, own in manifest.expansions.items()},
        routing=manifest.routing or Routing(),
        verified=verified,
        promises=promises,
        required=required,
    )


def _verification(manifest: Manifest) -> tuple[str, tuple[Promise, ...], tuple[str, ...]]:
    """Date and result, promises, and those that decide, as surgery.json has them."""
    found = manifest.verification
    if found is None:
        return "never", (), ()
    promises = tuple(Promise(**{**own, "problems": tuple(own["problems"])}) for own in found["promises"])
    said = f"{'passed' if found['passed'] else 'FAILED'} {found['date']}"
    routing = None if manifest.routing is None else plain_json(asdict(manifest.routing))
    runs = [run for own in manifest.expansions.values() for run in own.training]
    said = "; ".join(filter(None, [said, changed_since(found, runs, routing)]))
    return said, promises, tuple(found["required"])


def _summarise(expansion: ExpansionRecord) -> MemberSummary:
    plan = expansion.plan
    return MemberSummary(
        method=plan.method.name,
        variant=plan.variant,
        layers=plan.layers,
        tensors=len(plan.tensors),
        parameters=sum(tensor.elements for tensor in plan.tensors),
        bytes=sum(tensor.bytes for tensor in plan.tensors),
        runs=tuple(expansion.training),
    )
