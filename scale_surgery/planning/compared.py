"""Whether a plan that was made now is the one in a file, and what differs where it is not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.folder import read_json
from scale_surgery.checkpoint.schema import build, misfits
from scale_surgery.errors import PlanError, name_some
from scale_surgery.planning.architecture import Architecture
from scale_surgery.planning.plan import Plan
from scale_surgery.planning.selection import format_layers

# the same model may lie elsewhere and be called otherwise; costs are estimates; facts show in what is planned
UNDECISIVE = {"costs", "base_name", "facts"}
# its sizes are those of its config, but that heads and inner features are counted where they are split
OF_THE_BASE = {"base_fingerprint", "base_revision", "family"}


def check_same(plan: Plan, file: Path) -> None:
    """Check that a plan is the one in a file.

    Args:
        plan: A plan that was made now.
        file: A plan that `save_plan` wrote, of the same request.

    Raises:
        PlanError: If it was made for another base model, or if another was proved or planned there; the message names
            what differs, and what both were made with.
    """
    saved, made = read_json(file), plan.to_json()
    differing = {key for key in made if key not in UNDECISIVE and saved.get(key) != made[key]}
    if differing & OF_THE_BASE:
        raise PlanError(
            f"{file}: was made for another base model, {_named(saved)}, found {_named(made)}. Give the model that it "
            "was made for, or make it again with plan -o."
        )
    if not differing:
        return
    treatments = list(_other_treatments(_facts(saved).get("architecture"), plan.architecture))
    why = (
        "What passes its proof may depend on releases and on the processor. Expand where the plan was made, or make it "
        "again with plan -o, and review it."
        if treatments
        else "Another release of this program made it, or it was changed by hand. Make it again with plan -o."
    )
    what = "; ".join(treatments) or f"for the same request another plan is made here: {_other_parts(saved, made)}"
    raise PlanError(f"{file}: {what}. {_made_with(saved, made)} {why}")


def _named(plain: Mapping[str, Any]) -> str:
    revision = plain.get("base_revision")
    return f"{plain.get('base_name')} at {revision}" if revision else str(plain.get("base_name"))


def _other_treatments(saved: Any, made: Architecture) -> Iterator[str]:
    """Blocks that are treated in another way here, each with its layers; none where the file does not say."""
    if saved is None or any(misfits(saved, Architecture)):
        return
    there: Architecture = build(saved, Architecture)
    if len(there.kind_of_layer) != len(made.kind_of_layer) or max(there.kind_of_layer, default=0) >= len(there.kinds):
        return
    found: dict[tuple[str, str, str, str], list[int]] = {}
    for layer in range(len(made.kind_of_layer)):
        for one, other in zip(there.kind(layer).blocks, made.kind(layer).blocks, strict=False):
            if one.treatment != other.treatment:
                reason = one.reason or other.reason
                found.setdefault((other.name or other.group, one.treatment, other.treatment, reason), []).append(layer)
    for (name, before, now, reason), layers in found.items():
        title = f"layer{'s' * (len(layers) > 1)} {format_layers(tuple(layers))}"
        yield f"{name} of {title} is treated as {before} in the file, and as {now} here ({reason})"
    if there.enters != made.enters:
        yield f"the up stream enters by {there.enters} in the file, and by {made.enters} here"


def _other_parts(saved: Mapping[str, Any], made: Mapping[str, Any]) -> str:
    """What differs: tensors by name where they do, otherwise keys."""
    before, now = (_tensors(own.get("tensors")) for own in (saved, made))
    names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    keys = sorted(key for key in made if key not in {*UNDECISIVE, "tensors"} and saved.get(key) != made[key])
    tensors = [f"{len(names)} of the tensors ({name_some(names, 3)})"] if names else []
    return ", ".join([*keys, *tensors]) or "the order of the tensors"


def _tensors(plain: Any) -> dict[str, Any]:
    return {str(own.get("name")): own for own in plain if isinstance(own, Mapping)} if isinstance(plain, list) else {}


def _made_with(saved: Mapping[str, Any], made: Mapping[str, Any]) -> str:
    """What both plans were proved with."""
    before, now = (_versions(_facts(own).get("proof")) for own in (saved, made))
    return f"Both were proved with {now}." if before == now else f"It was proved with {before}, here with {now}."


def _facts(plain: Mapping[str, Any]) -> Mapping[str, Any]:
    facts = plain.get("facts")
    return facts if isinstance(facts, Mapping) else {}


def _versions(proof: Any) -> str:
    versions = proof.get("versions") if isinstance(proof, Mapping) else None
    if not isinstance(versions, Mapping) or not versions:
        return "releases that it does not name"
    return ", ".join(f"{name} {value}" for name, value in versions.items())
