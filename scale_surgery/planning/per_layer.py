"""Lists of a config.json with one value for each layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# keys of a config that hold the number of a token
TOKEN = re.compile(r"token(_id|_index)$|_id$")
# of a model with one layer, this would be such a list
CLASSES = "architectures"


def is_per_layer(key: str, value: Any, layers: int) -> bool:
    """Return True if a value of a config is a list with one entry for each layer."""
    if not isinstance(value, (list, tuple)) or key == CLASSES or TOKEN.search(key):
        return False
    # such lists may also count layers that predict further tokens
    if "layer" in key or key.endswith("_types"):
        return len(value) >= layers
    return len(value) == layers and "rope" not in key


def per_layer_lists(config: Mapping[str, Any], layers: int) -> dict[str, list[Any]]:
    """Lists of a config that hold one value for each layer, by key."""
    return {key: list(value) for key, value in config.items() if is_per_layer(key, value, layers)}
