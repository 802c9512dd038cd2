"""Names of expansions: checks of new names, and of the names in a model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from keyword import iskeyword

from scale_surgery.checkpoint.expansions import BASE_NAME
from scale_surgery.errors import PlanError, Problem


def check_name(name: str, known: Collection[str]) -> None:
    """Check that an expansion can have a name."""
    from torch import nn

    is_word = isinstance(name, str) and name.isidentifier()
    if not is_word or iskeyword(name) or name == BASE_NAME or hasattr(nn.ModuleDict(), name):
        raise PlanError(Problem("name-unfit", "name", name=name))
    # files are named after expansions, and some disks ignore case
    if name.casefold() in {each.casefold() for each in known}:
        raise PlanError(Problem("name-taken", "name", name=name))


def expansion_problems(name: str | None, paths: Sequence[str], model: str) -> Iterator[Problem]:
    """Yield the problem of an expansion name that a user gave, if there is one."""
    if name is not None and not paths:
        yield Problem("expansions-unnamed", f"expansion {name}", model=model)
    elif name is not None and name not in paths:
        yield Problem("path-unknown", f"expansion {name}", model=model, paths=paths)
