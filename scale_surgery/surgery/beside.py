"""Several expansions of one base: what can run side by side, and what a folder says when one comes or goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from scale_surgery.errors import CheckpointError, PlanError, counted
from scale_surgery.modeling.expanded_routers import PosteriorRouter, Router
from scale_surgery.planning.methods import refuse
from scale_surgery.planning.paths import path_problems
from scale_surgery.planning.plan import Plan
from scale_surgery.surgery.record import ExpansionRecord, Manifest


def check_beside(plans: Sequence[Plan]) -> None:
    """Refuse expansions that cannot run beside others.

    Args:
        plans: Plan of each.

    Raises:
        PlanError: If there are some; each is named.
    """
    problems = []
    for plan in plans:
        name = plan.request.name
        refuse(plan.method, "compose", name)
        if plan.architecture.own_code:
            problems.append(f"{name}: was made on a model with code of its own, expected one that transformers has.")
        fork = min(plan.collaboration.layers, default=None)
        problems += [f"{name}: {problem}" for problem in path_problems(plan.architecture, fork)]
    if problems:
        raise PlanError.from_problems(problems)


def with_expansions(
    manifest: Manifest, expansions: Mapping[str, ExpansionRecord], routing: Router | None = None
) -> Manifest:
    """What surgery.json says of a folder with other expansions.

    Args:
        manifest: What it said.
        expansions: What is said of each, in the order of the paths.
        routing: How it is to route; by default as before, where several run all paths alike at the start of a text.

    Returns:
        The new content; it was not verified.

    Raises:
        CheckpointError: If the folder's router does not go with so many.
    """
    before = manifest.routing
    if routing is None and len(expansions) != len(manifest.expansions):
        default = PosteriorRouter() if len(expansions) > 1 else None
        routing = default if before is None else before.without_prior()
    routing = routing or before
    if routing is not None:
        routing = routing.for_expansions(len(expansions))
        if problems := routing.problems(len(expansions)):
            raise CheckpointError(
                f"{manifest.base_name}: its router does not go with {counted(len(expansions), 'expansion')} "
                f"({' '.join(problems)}) Take the router away first: scale-surgery route-export --router none."
            )
    return replace(manifest, expansions=dict(expansions), routing=routing, verification=None)
