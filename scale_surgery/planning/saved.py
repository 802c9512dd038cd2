"""Plans as JSON: written to be reviewed, read back and checked that they fit together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from scale_surgery.checkpoint.files import write_json
from scale_surgery.checkpoint.folder import read_json
from scale_surgery.checkpoint.headers import FLOAT_DTYPES
from scale_surgery.errors import CheckpointError, PlanError
from scale_surgery.planning.costs import read_costs
from scale_surgery.planning.families import Sizes, get_family
from scale_surgery.planning.plan import Plan, plan
from scale_surgery.planning.request import Request
from scale_surgery.planning.specs import Collaboration, Widths
from scale_surgery.planning.tensors import Init, TensorPlan

# of a spoiled record that are named in one line
MAX_PROBLEMS = 5


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
    try:
        plan = _parse(plain)
        get_family(plan.family)
        problems = _plan_problems(plan)
    except (KeyError, TypeError, AttributeError, ValueError, CheckpointError) as error:
        raise PlanError(str(error)) from error
    if problems:
        raise PlanError("; ".join(problems[:MAX_PROBLEMS]))
    return plan


def _parse(plain: Mapping[str, Any]) -> Plan:
    tensors = [TensorPlan(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in plain["tensors"]]
    where = {name: tuple(values) for name, values in plain["collaboration"].items()}
    return Plan(
        **{
            **plain,
            "request": Request(**plain["request"]),
            "sizes": Sizes(**plain["sizes"]),
            "widths": Widths(**plain["widths"]),
            "layers": tuple(plain["layers"]),
            "collaboration": Collaboration(**where),
            "tensors": tuple(tensors),
            "shards": tuple(plain["shards"]),
            "costs": read_costs(plain["costs"]),
        }
    )


def _plan_problems(plan: Plan) -> list[str]:
    """Values of a recorded plan that are of the wrong kind, or do not fit each other."""
    sizes = plan.sizes
    numbers = {
        "sizes": (sizes.hidden, sizes.layers, sizes.inner, sizes.vocabulary),
        "widths": asdict(plan.widths).values(),
    }
    problems = [f"plan.{name}" for name, own in numbers.items() if not all(type(number) is int for number in own)]
    problems += [problem for tensor in plan.tensors for problem in _tensor_problems(plan, tensor)]
    if plan.specs.get("expanded_layers") != list(plan.layers):
        return [*problems, "plan.layers are not those of plan.specs"]
    if plan.method.adds_layers != (plan.numbering is not None):
        return [*problems, "plan.request.method is not that of plan.specs"]
    if plan.request.variant not in plan.method.variants:
        problems.append(f"plan.request.variant is {plan.request.variant!r}, which is none of {plan.method.name}")
    return problems or plan.method.plan_problems(plan)


def _tensor_problems(plan: Plan, tensor: TensorPlan) -> Iterator[str]:
    if not all(isinstance(text, str) for text in (tensor.name, tensor.block)):
        yield "plan.tensors: name"
    if not all(type(size) is int for size in tensor.shape):
        yield "plan.tensors: shape"
    if tensor.init not in get_args(Init):
        yield f"plan.tensors, {tensor.name}: init {tensor.init!r} of {tensor.source!r}"
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
    try:
        content = read_json(file)
        _ = content["base_fingerprint"], content["tensors"]
        return Request(**content["request"])
    except (KeyError, TypeError, CheckpointError) as error:
        found = "" if isinstance(error, CheckpointError) else f" ({error})"
        missing = "" if file.is_file() else "there is no such file, it "
        raise PlanError(f"{file}: {missing}is not a plan of scale-surgery{found}. Make one with plan -o.") from error


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
