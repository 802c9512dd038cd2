"""The text that the training runs in surgery.json rehearsed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# value of --rehearse for text that the base writes
ITSELF = "self"


def rehearsed_text(run: Mapping[str, Any]) -> str:
    """Describe the text that a recorded run rehearsed; empty without rehearsal."""
    settings = run.get("settings")
    texts = settings.get("rehearse") if isinstance(settings, Mapping) else None
    if not texts:
        return ""
    return "text that the base wrote itself" if list(texts) == [ITSELF] else "other text"


def rehearsed_texts(runs: Iterable[Mapping[str, Any]]) -> str:
    """Describe the rehearsed texts of several runs, each kind once."""
    return " and ".join(dict.fromkeys(text for run in runs if (text := rehearsed_text(run))))
