"""Plans as JSON: written to be reviewed, read back and checked that they fit together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.files import write_json
from scale_surgery.checkpoint.folder import read_json
from scale_surgery.checkpoint.headers import FLOAT_DTYPES
from scale_surgery.checkpoint.schema import build, in_one_line, misfits
from scale_surgery.errors import CheckpointError, PlanError
from scale_surgery.planning.families import get_family
from scale_surgery.planning.plan import Plan, plan
from scale_surgery.planning.request import Request
from scale_surgery.planning.spec_schema import spec_problems
from scale_surgery.planning.tensors import TensorPlan

# the same model may lie elsewhere and be called otherwise; costs are estimates
UNDECISIVE = {"costs", "base_name"}
OF_THE_BASE = {"base_fingerprint", "base_revision", "family", "sizes"}


def save_plan(plan: Plan, file: Path) -> None:
    """Write a plan as JSON."""
    write_json(file, plan.to_json())


def read_plan(plain: Mapping[str, Any]) -> Plan:
    """Make a plan of what `Plan.to_json` made of it, such as the plan in surgery.json, and check that it fits together.

    Args:
        plain: Plain JSON values.

    Returns:
        The plan.

    Raises:
        PlanError: If it lacks something, or a value is of the wrong kind or does not fit another.
    """
    if problems := list(misfits(plain, Plan, "plan")):
        raise PlanError(in_one_line(problems))
    plan: Plan = build(plain, Plan)
    check_plan(plan)
    return plan


def check_plan(plan: Plan) -> None:
    """Check that a plan whose values are of the right kinds fits together.

    Raises:
        PlanError: If it does not; every problem is listed.
    """
    problems = spec_problems(plan.specs, "plan.specs")
    try:
        get_family(plan.family)
        problems = problems or _plan_problems(plan)
    except (CheckpointError, LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise PlanError(str(error)) from error
    if problems:
        raise PlanError(in_one_line(problems))


def _plan_problems(plan: Plan) -> list[str]:
    """Values of a recorded plan that are of the wrong kind, or do not fit each other."""
    problems = [problem for tensor in plan.tensors for problem in _tensor_problems(plan, tensor)]
    if plan.specs.get("expanded_layers") != list(plan.layers):
        return [*problems, "plan.layers are not those of plan.specs"]
    if plan.method.adds_layers != (plan.numbering is not None):
        return [*problems, "plan.request.method is not that of plan.specs"]
    if plan.request.variant not in plan.method.variants:
        problems.append(f"plan.request.variant is {plan.request.variant!r}, which is none of {plan.method.name}")
    return problems or plan.method.plan_problems(plan)


def _tensor_problems(plan: Plan, tensor: TensorPlan) -> Iterator[str]:
    if tensor.dtype not in FLOAT_DTYPES.values():
        yield f"plan.tensors, {tensor.name}: dtype {tensor.dtype!r}"
    if not (tensor.layer is None or tensor.layer in plan.layers) or tensor.shard not in plan.shards:
        yield f"plan.tensors, {tensor.name}: layer {tensor.layer!r}, shard {tensor.shard!r}"


def load_plan(model: str | Path, file: Path, *, revision: str | None = None) -> Plan:
    """Make the plan that a file holds, for a base model; what was reviewed is what is done.

    Args:
        model: The base model, a folder or a Hub id.
        file: A plan that `save_plan` wrote.
        revision: Branch, tag or commit of a Hub repository.

    Returns:
        The plan.

    Raises:
        PlanError: If the file is no plan, or this base model and this release would make another.
        CheckpointError: If the model cannot be read.
    """
    request = _saved_request(file)
    made = plan(model, request, revision=revision)
    _check_same(made, file)
    return made


def _saved_request(file: Path) -> Request:
    missing = "" if file.exists() else "there is no such file, it "
    try:
        content = read_json(file)
        if problems := list(misfits(content, Plan)):
            raise PlanError(in_one_line(problems))
    except (PlanError, CheckpointError) as error:
        found = "" if missing else f" ({error})"
        raise PlanError(f"{file}: {missing}is not a plan of scale-surgery{found}. Make one with plan -o.") from error
    request: Request = build(content["request"], Request)
    return request


def _check_same(plan: Plan, file: Path) -> None:
    saved, made = read_json(file), plan.to_json()
    differing = {key for key in made if key not in UNDECISIVE and saved.get(key) != made[key]}
    if differing & OF_THE_BASE:
        raise PlanError(
            f"{file}: was made for another base model, {_named(saved)}, found {_named(made)}. Give the model that it "
            "was made for, or make it again with plan -o."
        )
    if differing:
        raise PlanError(
            f"{file}: another release of this program made it, and this one would plan other tensors for the same "
            "request. Make it again with plan -o."
        )


def _named(plain: Mapping[str, Any]) -> str:
    revision = plain.get("base_revision")
    return f"{plain.get('base_name')} at {revision}" if revision else str(plain.get("base_name"))
