"""What cannot be composed: names, numbers, expansions of another base, and those that cannot run beside others."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from scale_surgery.checkpoint.sources import listed
from scale_surgery.composition.ground import Ground
from scale_surgery.composition.record import Mixing, mixing_problems
from scale_surgery.errors import PlanError
from scale_surgery.planning.methods import refuse
from scale_surgery.planning.routing_specs import path_problems
from scale_surgery.progress import Track
from scale_surgery.running.expansion_names import check_name
from scale_surgery.surgery.extract_folder import Extract, check_own_files
from scale_surgery.surgery.same_base import find_differing, refuse_differing

ADVICE = "An expansion runs on its own base alone: take it out of the list, or give that base."


def named_extracts(extracts: Mapping[str, str | Path] | Sequence[str | Path] | str | Path) -> dict[str, str | Path]:
    """Extracts by name; one without a name is called as its folder is, with _ for each sign that no name may have.

    Raises:
        PlanError: If two would have the same name, or one is no folder.
    """
    given = list(extracts.values()) if isinstance(extracts, Mapping) else listed(extracts)
    if problems := [
        f"extracts: {own!r} is no folder, expected the path of one or a Hub id."
        for own in given
        if not isinstance(own, str | Path)
    ]:
        raise PlanError.from_problems(problems)
    if isinstance(extracts, Mapping):
        return dict(extracts)
    # names of folders often have hyphens and dots, and may begin with a digit
    names = [re.sub(r"\W|^(?=\d)", "_", Path(extract).name) for extract in given]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise PlanError(
            f"names: {', '.join(twice)} would be the name of several extracts, expected a name for each. Give --names."
        )
    return dict(zip(names, given, strict=True))


def check_names(
    wanted: Mapping[str, str | Path], remove: Sequence[str], known: Sequence[str], mixing: Mixing | None
) -> None:
    """Refuse names that cannot be had or are not there, numbers out of range, and a composition of nothing.

    Args:
        wanted: Extracts that are to come in, by name.
        remove: Names of expansions that are to go.
        known: Names of expansions that are there.
        mixing: How paths are to be mixed; None where nothing is said.

    Raises:
        PlanError: If there is anything to refuse; every problem is named.
    """
    problems = []
    for name in wanted:
        try:
            check_name(name, [own for own in known if own not in remove])
        except PlanError as error:
            problems.append(str(error))
    problems += [
        f"remove: {name} is no expansion of this folder, expected {' or '.join(known) or 'a composed folder'}."
        for name in remove
        if name not in known
    ]
    left = [name for name in known if name not in remove] + list(wanted)
    problems += [] if left else ["extracts: none is given or left, expected at least one expansion."]
    problems += [] if mixing is None else mixing_problems(mixing, left)
    if problems:
        raise PlanError.from_problems(problems)


def check_runs_beside(opened: Mapping[str, Extract]) -> None:
    """Refuse expansions that cannot run beside others.

    Args:
        opened: The expansions, by name.

    Raises:
        PlanError: If there are some; each is named.
    """
    problems = []
    for name, extract in opened.items():
        plan = extract.manifest.plan
        refuse(plan.method, "compose", name)
        if plan.architecture.own_code:
            problems.append(f"{name}: was made on a model with code of its own, expected one that transformers has.")
        fork = min(plan.collaboration.layers, default=None)
        problems += [f"{name}: {problem}" for problem in path_problems(plan.architecture, fork)]
    if problems:
        raise PlanError.from_problems(problems)


def check_base(name: str, extract: Extract, ground: Ground, track: Track) -> None:
    """Refuse an extract that fits a base, and was made on another; and one whose files are not what it says.

    Args:
        name: What the expansion is called.
        extract: The extract.
        ground: The base.
        track: Makes progress bars.

    Raises:
        CheckpointError: If it is one; the tensors are named.
    """
    differing = find_differing(extract, ground.base, ground.tensors)
    refuse_differing(extract, f"{name}: {ground.name}", differing, len(ground.tensors), ADVICE)
    check_own_files(extract, track)
