"""Plans as JSON: base, facts and request, from which the plan is made again and compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.files import write_json
from scale_surgery.checkpoint.folder import read_json
from scale_surgery.checkpoint.records import DAMAGE, read_record
from scale_surgery.errors import CheckpointError, PlanError, Problem, SurgeryError, problems_of
from scale_surgery.planning.architecture import Architecture
from scale_surgery.planning.base import Base, BaseFacts, check_facts
from scale_surgery.planning.plan import Plan, base_title, plan_expansion
from scale_surgery.planning.request import Request
from scale_surgery.planning.selection import format_layers

# key of this package in the versions of a proof
PACKAGE = "scale-surgery"


@dataclass(frozen=True)
class SavedPlan:
    """The content of a plan file; see `Plan`."""

    base_name: str
    base_revision: str | None
    base_fingerprint: str
    facts: BaseFacts
    request: Request


def save_plan(plan: Plan, file: Path) -> None:
    """Write a plan as JSON."""
    decided = SavedPlan(plan.base_name, plan.base_revision, plan.base_fingerprint, plan.facts, plan.request)
    write_json(file, asdict(decided))


def read_plan(file: Path) -> SavedPlan:
    """Read a plan from a file."""
    if not file.exists():
        raise PlanError(Problem("plan-missing", file))
    try:
        saved = read_record(read_json(file), SavedPlan)
        check_facts(saved.facts)
    except (ValueError, PlanError, CheckpointError) as error:
        raise PlanError(Problem("plan-unreadable", file, *problems_of(error))) from error
    return saved


def check_same(saved: SavedPlan, base: Base, plan: Plan, file: Path) -> None:
    """Check that a saved plan is the plan made now for the same request; its facts may be worded otherwise."""
    if (saved.base_fingerprint, saved.base_revision) != (plan.base_fingerprint, plan.base_revision):
        reviewed_base, found = (base_title(of.base_name, of.base_revision) for of in (saved, plan))
        raise PlanError(Problem("plan-of-other-base", file, base=reviewed_base, found=found))
    before, now = _versions(saved.facts), _versions(plan.facts)
    proofs = {"before": _listed(before), "now": _listed(now)}
    # blocks are compared layer by layer
    there, here = (of.facts.sizes.layers for of in (saved, plan))
    if there != here:
        count = Problem("facts-layer-count", "facts.architecture.kind_of_layer", found=there, expected=here)
        raise PlanError(Problem("plan-not-followed", file, count))
    if treatments := list(_other_treatments(saved.facts.architecture, plan.architecture)):
        raise PlanError(Problem("plan-treatments-differ", file, *treatments, **proofs))
    try:
        reviewed = plan_expansion(
            replace(base, facts=saved.facts), saved.request, name=plan.base_name, revision=plan.base_revision
        )
    except (SurgeryError, *DAMAGE) as error:
        raise PlanError(Problem("plan-not-followed", file, *problems_of(error))) from error
    # facts may be worded otherwise, if the same plan follows
    names = [field.name for field in fields(Plan) if field.name != "facts"]
    differing = [name for name in names if getattr(reviewed, name) != getattr(plan, name)]
    if before.get(PACKAGE) != now.get(PACKAGE):
        differing.append("release of this program")
    if differing:
        raise PlanError(Problem("plan-differs", file, parts=differing, **proofs))


def _versions(facts: BaseFacts) -> Mapping[str, Any]:
    versions = facts.proof.get("versions")
    return versions if isinstance(versions, Mapping) else {}


def _listed(versions: Mapping[str, Any]) -> list[str]:
    return [f"{name} {value}" for name, value in versions.items()] or ["releases that it does not name"]


def _other_treatments(saved: Architecture, made: Architecture) -> Iterator[Problem]:
    """Yield a problem for each block whose treatment differs from the file."""
    layers_of: dict[tuple[str, str, str, str], list[int]] = {}
    for layer in range(len(made.kind_of_layer)):
        for there, here in zip(saved.kind(layer).blocks, made.kind(layer).blocks, strict=False):
            if there.treatment != here.treatment:
                key = here.name or here.group, there.treatment, here.treatment, there.reason or here.reason
                layers_of.setdefault(key, []).append(layer)
    for (name, before, now, reason), layers in layers_of.items():
        title = f"layer{'s' * (len(layers) > 1)} {format_layers(tuple(layers))}"
        yield Problem("treatment-differs", f"{name} of {title}", before=before, now=now, reason=reason)
    if saved.enters != made.enters:
        yield Problem("up-stream-enters-otherwise", "the up stream", before=saved.enters, now=made.enters)
