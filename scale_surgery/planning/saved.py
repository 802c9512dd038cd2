"""Plans as JSON: written to be reviewed; what was asked for is read back, and the plan is made again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.expansions import place_of_specs, specs_of_expansions
from scale_surgery.checkpoint.files import write_json
from scale_surgery.checkpoint.folder import read_json
from scale_surgery.checkpoint.names import CONFIG_FILE
from scale_surgery.checkpoint.numbering import CONFIG_KEY, ORIGIN_KEY
from scale_surgery.checkpoint.schema import build, in_one_line, misfits
from scale_surgery.errors import CheckpointError, PlanError
from scale_surgery.planning.plan import Origin, Plan
from scale_surgery.planning.request import Request


def save_plan(plan: Plan, file: Path) -> None:
    """Write a plan as JSON."""
    write_json(file, plan.to_json())


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
