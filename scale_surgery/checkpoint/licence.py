"""The licence that a model card names."""

from __future__ import annotations

from typing import Any

LICENCE_KEYS = ("license", "license_name", "license_link")


def read_licence(base_text: str | None) -> dict[str, Any]:
    """The licence that a card names: `license`, `license_name` and `license_link`, those that are there."""
    from huggingface_hub import ModelCard

    if base_text is None or not base_text.lstrip().startswith("---"):
        return {}
    try:
        data: dict[str, Any] = ModelCard(base_text, ignore_metadata_errors=True).data.to_dict()  # type: ignore[no-untyped-call]
    except Exception:
        return {}  # a card that cannot be parsed names no licence
    return {key: data[key] for key in LICENCE_KEYS if data.get(key)}
