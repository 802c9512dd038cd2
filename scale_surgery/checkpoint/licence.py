"""The licence that a model card names."""

from __future__ import annotations

import re
from typing import Any

LICENCE_KEYS = ("license", "license_name", "license_link")


def read_licence(base_text: str | None) -> dict[str, Any]:
    """The licence that a card names: `license`, `license_name` and `license_link`, those that are there."""
    # to import huggingface_hub's ModelCard for this takes as long as all else of `extract`
    import yaml

    if base_text is None or not base_text.lstrip().startswith("---"):
        return {}
    try:
        _, block, _ = re.split(r"^---\s*$", base_text, maxsplit=2, flags=re.MULTILINE)
        data = yaml.safe_load(block)
        # a name such as 2024-05-01 is a date to YAML
        given = {key: data[key] for key in LICENCE_KEYS if data.get(key)}
        return {key: value if isinstance(value, list) else str(value) for key, value in given.items()}
    except (ValueError, AttributeError, yaml.YAMLError):
        return {}  # a card that cannot be parsed names no licence
