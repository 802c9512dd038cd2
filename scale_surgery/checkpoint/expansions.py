"""Named expansions in files: names of their tensors, and what config.json says of each.

    model.layers.3.mlp.up_proj.weight                     the base's
    model.layers.3.mlp.up_proj.expansions.medicine.w21    beside it, a block of the expansion `medicine`

Tensors of the base have no `expansions` in their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scale_surgery.checkpoint.numbering import CONFIG_KEY

# what an expansion is called where nobody gives it a name
DEFAULT_NAME = "default"
# what its base is called among paths
BASE_NAME = "base"
# what a path without W12 is called, whose up stream reads the base stream; no expansion can be called so
PRESERVE_NAME = "preserve side"
INFIX = ".expansions."
# under the key scale_surgery of config.json
BASE_KEY, EXPANSIONS_KEY, ROUTER_KEY = "base", "expansions", "router"


def tensor_name(module: str, expansion: str, block: str) -> str:
    """Name of a block of an expansion beside a stock module."""
    return f"{module}{INFIX}{expansion}.{block}"


def expansion_of(tensor: str) -> str | None:
    """The expansion that a tensor belongs to, by its name; None for one of the base."""
    _, infix, rest = tensor.partition(INFIX)
    return rest.partition(".")[0] if infix else None


def renamed(tensor: str, expansion: str) -> str:
    """Name of the same block of an expansion that is called otherwise."""
    module, _, rest = tensor.partition(INFIX)
    return tensor_name(module, expansion, rest.partition(".")[2])


def nameless(tensor: str) -> str:
    """What a block is called whatever its expansion is: `model.layers.3.mlp.up_proj.w21`."""
    module, infix, rest = tensor.partition(INFIX)
    return f"{module}.{rest.partition('.')[2]}" if infix else tensor


def specs_of_expansions(specs: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """What the key `scale_surgery` of config.json says of each expansion; one with duplicated layers has but one."""
    found = [specs] if "method" in specs else specs.get(EXPANSIONS_KEY)
    return [own for own in found if isinstance(own, Mapping)] if isinstance(found, list) else []


def path_names(specs: Mapping[str, Any]) -> tuple[str, ...]:
    """Names by which paths of a model are asked for, the base's first; none where its only expansion was given none."""
    names = tuple(str(own.get("name", DEFAULT_NAME)) for own in specs_of_expansions(specs))
    return (BASE_NAME, *names) if names not in ((), (DEFAULT_NAME,)) else ()


def place_of_specs(specs: Mapping[str, Any], number: int = 0) -> str:
    """Where config.json has what it says of an expansion, by its place among them, for messages."""
    return CONFIG_KEY if "method" in specs else f"{CONFIG_KEY}.{EXPANSIONS_KEY}[{number}]"
