"""Plans as JSON: written to be reviewed, read back and checked that they fit together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.expansions import place_of_specs, specs_of_expansions
from scale_surgery.checkpoint.files import write_json
from scale_surgery.checkpoint.folder import read_json
from scale_surgery.checkpoint.headers import FLOAT_DTYPES
from scale_surgery.checkpoint.names import CONFIG_FILE
from scale_surgery.checkpoint.numbering import CONFIG_KEY, ORIGIN_KEY
from scale_surgery.checkpoint.schema import build, in_one_line, misfits
from scale_surgery.errors import CheckpointError, PlanError
from scale_surgery.planning.base import sizes_of_blocks
from scale_surgery.planning.plan import Origin, Plan
from scale_surgery.planning.request import Request
from scale_surgery.planning.spec_schema import spec_problems
from scale_surgery.planning.tensors import TensorPlan


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


def check_plan(plan: Plan, place: str = "") -> None:
    """Check that a plan whose values are of the right kinds fits together.

    Args:
        plan: The plan.
        place: What is said before the names of values: where the plan lies.

    Raises:
        PlanError: If it does not; every problem is listed.
    """
    problems = spec_problems(plan.specs, "plan.specs")
    try:
        problems = problems or _plan_problems(plan)
    except PlanError as error:
        problems = [str(error)]
    except (CheckpointError, LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise PlanError(str(error)) from error
    if problems:
        raise PlanError(in_one_line([f"{place}{problem}" for problem in problems]))


def _plan_problems(plan: Plan) -> list[str]:
    """Values of a recorded plan that are of the wrong kind, or do not fit each other."""
    problems = [problem for tensor in plan.tensors for problem in _tensor_problems(plan, tensor)]
    if plan.family != plan.architecture.model_type:
        problems.append(f"plan.family is {plan.family!r}, expected {plan.architecture.model_type!r}")
    if len(plan.architecture.kind_of_layer) != plan.sizes.layers or not plan.architecture.kinds:
        named = len(plan.architecture.kind_of_layer)
        return [*problems, f"plan.architecture.kind_of_layer names {named} layers, expected {plan.sizes.layers}"]
    if not set(plan.architecture.kind_of_layer) <= set(range(len(plan.architecture.kinds))):
        return [*problems, "plan.architecture.kind_of_layer names kinds that there are none of"]
    problems += _size_problems(plan)
    if not set(plan.layers) <= set(range(plan.sizes.layers)):
        return [*problems, "plan.layers names layers that there are none of"]
    if plan.specs.get("expanded_layers") != list(plan.layers):
        return [*problems, "plan.layers are not those of plan.specs"]
    if plan.method.adds_layers != (plan.numbering is not None):
        return [*problems, "plan.request.method is not that of plan.specs"]
    if plan.request.variant not in plan.method.variants:
        problems.append(f"plan.request.variant is {plan.request.variant!r}, which is none of {plan.method.name}")
    return problems or plan.method.plan_problems(plan)


def _size_problems(plan: Plan) -> Iterator[str]:
    """Sizes that are not those of the blocks of which the layers are made."""
    facts = plan.architecture
    linears = (linear for kind in facts.kinds for linear in kind.linears)
    hidden = [("hidden", linear.inputs) for linear in linears if linear.reads == "residual"]
    for name, size in dict.fromkeys([*hidden, *sizes_of_blocks(facts).items()]):
        if getattr(plan.sizes, name) != size:
            yield f"plan.sizes.{name} is {getattr(plan.sizes, name)}, expected {size} from plan.architecture"


def _tensor_problems(plan: Plan, tensor: TensorPlan) -> Iterator[str]:
    if tensor.dtype not in FLOAT_DTYPES.values():
        yield f"plan.tensors, {tensor.name}: dtype {tensor.dtype!r}"
    if not (tensor.layer is None or tensor.layer in plan.layers) or tensor.shard not in plan.shards:
        yield f"plan.tensors, {tensor.name}: layer {tensor.layer!r}, shard {tensor.shard!r}"


def saved_request(file: Path) -> Request:
    """Read what was asked for, of a plan in a file.

    Args:
        file: A plan that `save_plan` wrote.

    Raises:
        PlanError: If the file is no plan.
    """
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


def saved_origins(config: Mapping[str, Any], title: str) -> list[Origin]:
    """Read what a config.json keeps of the plan of each of its expansions, by the names that they have there.

    Args:
        config: Parsed config.json of an expanded model.
        title: What the model is called.

    Raises:
        PlanError: If it keeps nothing of one, or a value is of the wrong kind.
    """
    found = []
    for number, specs in enumerate(specs_of_expansions(config[CONFIG_KEY])):
        plain, place = specs.get(ORIGIN_KEY), place_of_specs(config[CONFIG_KEY], number)
        if plain is None:
            raise PlanError(
                f"{title}: its {CONFIG_FILE} does not say how it was expanded. Give the expanded model that was "
                "trained: --expanded EXPANDED."
            )
        if problems := list(misfits(plain, Origin, f"{place}.{ORIGIN_KEY}")):
            raise PlanError(f"{title}: {CONFIG_FILE}: {in_one_line(problems)}. Restore it from where you got it.")
        origin: Origin = build(plain, Origin)
        # one that was made by itself may have got another name since
        request = replace(origin.request, name=specs.get("name", origin.request.name))
        found.append(replace(origin, request=request))
    return found
