"""Names of expansions: valid ones, and those that a model has."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from keyword import iskeyword

from scale_surgery.checkpoint.expansions import BASE_NAME
from scale_surgery.errors import PlanError


def check_name(name: str, known: Collection[str]) -> None:
    """Refuse a name that an expansion cannot have."""
    from torch import nn

    is_word = isinstance(name, str) and name.isidentifier()
    if not is_word or iskeyword(name) or name == BASE_NAME or hasattr(nn.ModuleDict(), name):
        raise PlanError(
            f"name: is {name!r}, expected letters, digits and underscores, no digit first, and no word of Python's or "
            "ours. Choose another, such as medicine."
        )
    if name in known:
        raise PlanError(
            f"name: {name} is an expansion of this model already, expected a new name. Choose another, or take that "
            "one off first: compose --remove, or model.delete_expansion."
        )


def expansion_problems(name: str | None, paths: Sequence[str], model: str) -> Iterator[str]:
    """Problems with the name of an expansion that a user gives."""
    if name is not None and not paths:
        yield (
            f"expansion {name}: {model} has no expansions under names, expected a composed folder, or one expanded "
            "with --name. Leave it out."
        )
    elif name is not None and name not in paths:
        yield f"expansion {name}: is no path of {model}, expected {' or '.join(paths)}."
