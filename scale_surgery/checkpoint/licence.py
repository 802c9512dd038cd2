"""Licences in model cards."""

from __future__ import annotations

import re
from typing import Any

LICENCE_KEYS = ("license", "license_name", "license_link")


def read_licence(base_text: str | None) -> dict[str, Any]:
    """Return the licence fields of a model card that are present: `license`, `license_name` and `license_link`."""
    # importing huggingface_hub's ModelCard would double the time of `extract`
    import yaml

    if base_text is None or not base_text.lstrip().startswith("---"):
        return {}
    try:
        _, block, _ = re.split(r"^---\s*$", base_text, maxsplit=2, flags=re.MULTILINE)
        data = yaml.safe_load(block)
        # YAML parses a name such as 2024-05-01 as a date
        given = {key: data[key] for key in LICENCE_KEYS if data.get(key)}
        return {key: value if isinstance(value, list) else str(value) for key, value in given.items()}
    except (ValueError, AttributeError, yaml.YAMLError):
        return {}  # an invalid card names no licence
