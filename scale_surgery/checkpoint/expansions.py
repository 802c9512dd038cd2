"""Named expansions in files: names of their tensors, and their specifications in config.json.

    model.layers.3.mlp.up_proj.weight                     a tensor of the base
    model.layers.3.mlp.up_proj.expansions.medicine.w21    a block of the expansion `medicine` for this module

Names of base tensors do not contain `expansions`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scale_surgery.checkpoint.numbering import CONFIG_KEY

# name of an expansion without a given name
DEFAULT_NAME = "default"
# name of the base among paths
BASE_NAME = "base"
# name of a path without W12 whose up stream reads the base stream; not allowed for expansions
PRESERVE_NAME = "preserve side"
INFIX = ".expansions."
# keys inside `scale_surgery` in config.json
BASE_KEY, EXPANSIONS_KEY, ROUTER_KEY = "base", "expansions", "router"
# key of a fused model: the base's config values that the fused config replaces
STOCK_KEY = "stock"


def tensor_name(module: str, expansion: str, block: str) -> str:
    """Return the name of a block of an expansion for a stock module."""
    return f"{module}{INFIX}{expansion}.{block}"


def expansion_of(tensor: str) -> str | None:
    """Return the expansion in the name of a tensor, or None for a base tensor."""
    _, infix, rest = tensor.partition(INFIX)
    return rest.partition(".")[0] if infix else None


def renamed(tensor: str, expansion: str) -> str:
    """Return the name of a tensor after its expansion is renamed."""
    module, _, rest = tensor.partition(INFIX)
    return tensor_name(module, expansion, rest.partition(".")[2])


def nameless(tensor: str) -> str:
    """Return the name of a block without its expansion: `model.layers.3.mlp.up_proj.w21`."""
    module, infix, rest = tensor.partition(INFIX)
    return f"{module}.{rest.partition('.')[2]}" if infix else tensor


def specs_of_expansions(specs: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the specifications of each expansion under the key `scale_surgery`.

    A model with duplicated layers has one.
    """
    entries = [specs] if "method" in specs else specs.get(EXPANSIONS_KEY)
    return [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []


def path_names(specs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the paths of a model, the base's first.

    They are empty if its only expansion is unnamed, or if it is fused with its base, so that no path runs alone.
    """
    entries = specs_of_expansions(specs)
    names = tuple(str(entry.get("name", DEFAULT_NAME)) for entry in entries)
    is_fused = any(entry.get("fused") for entry in entries)
    return () if is_fused or names in ((), (DEFAULT_NAME,)) else (BASE_NAME, *names)


def place_of_specs(specs: Mapping[str, Any], number: int = 0) -> str:
    """Return the config.json key of the specifications of an expansion, for messages."""
    return CONFIG_KEY if "method" in specs else f"{CONFIG_KEY}.{EXPANSIONS_KEY}[{number}]"
