"""What `serve` shows before the server's own log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import RenderableType

from scale_surgery.show.layout import Facts

if TYPE_CHECKING:
    from scale_surgery.running.serve import Served


def render_served(served: Served) -> RenderableType:
    """Where a model is served, and by which name."""
    requests = "chat, responses, completions" if served.has_chat_template else "completions; it has no chat template"
    rows = [("model", served.model), ("base URL", served.url), ("requests", requests), ("stop", "Ctrl-C")]
    return Facts("serving", rows)
