"""Named expansions in files: names of their tensors, and their specifications in config.json.

    model.layers.3.mlp.up_proj.weight                     the base's
    model.layers.3.mlp.up_proj.expansions.medicine.w21    beside it, a block of the expansion `medicine`

Tensors of the base have no `expansions` in their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scale_surgery.checkpoint.numbering import CONFIG_KEY

# name of an expansion without a given name
DEFAULT_NAME = "default"
# name of the base among paths
BASE_NAME = "base"
# name of a path without W12 whose up stream reads the base stream; no expansion can have it
PRESERVE_NAME = "preserve side"
INFIX = ".expansions."
# under the key scale_surgery of config.json
BASE_KEY, EXPANSIONS_KEY, ROUTER_KEY = "base", "expansions", "router"
# of a fused model: values of the base's config that are others here
STOCK_KEY = "stock"


def tensor_name(module: str, expansion: str, block: str) -> str:
    """Name of a block of an expansion beside a stock module."""
    return f"{module}{INFIX}{expansion}.{block}"


def expansion_of(tensor: str) -> str | None:
    """The expansion that a tensor belongs to, by its name; None for one of the base."""
    _, infix, rest = tensor.partition(INFIX)
    return rest.partition(".")[0] if infix else None


def renamed(tensor: str, expansion: str) -> str:
    """Name of a tensor if its expansion had another name."""
    module, _, rest = tensor.partition(INFIX)
    return tensor_name(module, expansion, rest.partition(".")[2])


def nameless(tensor: str) -> str:
    """Name of a block without that of its expansion: `model.layers.3.mlp.up_proj.w21`."""
    module, infix, rest = tensor.partition(INFIX)
    return f"{module}.{rest.partition('.')[2]}" if infix else tensor


def specs_of_expansions(specs: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The specifications of each expansion under the key `scale_surgery`; of duplicated layers there is one."""
    entries = [specs] if "method" in specs else specs.get(EXPANSIONS_KEY)
    return [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []


def path_names(specs: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the paths of a model, the base's first; none where its only expansion has no name."""
    names = tuple(str(entry.get("name", DEFAULT_NAME)) for entry in specs_of_expansions(specs))
    return (BASE_NAME, *names) if names not in ((), (DEFAULT_NAME,)) else ()


def place_of_specs(specs: Mapping[str, Any], number: int = 0) -> str:
    """Key of config.json that holds the specifications of an expansion, for messages."""
    return CONFIG_KEY if "method" in specs else f"{CONFIG_KEY}.{EXPANSIONS_KEY}[{number}]"
