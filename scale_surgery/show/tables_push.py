"""Tables of a pushed or served model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from scale_surgery.show.layout import Facts, NamedRows, heading, sentence
from scale_surgery.show.tables import format_bytes

if TYPE_CHECKING:
    from scale_surgery.hub.push import Pushed
    from scale_surgery.talking.serve import Served

ORIGINS = {"base": "the base's, unchanged", "model": "", "written": "written for the repository"}
FORMS = {
    "expanded": "expanded model",
    "extract": "expansion without its base",
    "stock": "stock checkpoint",
}
CARDS = {"written": "generated", "own": "your own", "kept": "kept in the repository"}


def render_files(pushed: Pushed) -> RenderableType:
    """Render the files that a repository gets, and the files that are left out."""
    table = NamedRows(["", ""], left=(2,))
    for file in pushed.files:
        table.add_row(file.name, format_bytes(file.bytes), ORIGINS[file.origin])
    rows: list[RenderableType] = [sentence(f"left out: {name}", "yellow") for name in pushed.left_out]
    rows += [sentence(f"removed from the repository: {name}", "yellow") for name in pushed.removed]
    return Group(heading("files"), table, *rows, Text())


def render_pushed(pushed: Pushed) -> RenderableType:
    """Render a push, or its dry run."""
    base = sum(file.bytes for file in pushed.files if file.origin == "base")
    whose = f"; {format_bytes(base)} from the base" if base else ""
    visible = "private" if pushed.is_private else "public"
    rows = [
        ("repository", f"{pushed.repo}, {visible}"),
        ("form", FORMS[pushed.form]),
        ("files", f"{len(pushed.files)}, {format_bytes(pushed.bytes)}{whose}"),
        ("card", CARDS[pushed.card_origin]),
        ("checked", "bytes and structure" if pushed.is_checked else "no (--no-verify)"),
    ]
    if pushed.commit is None:
        rows.append(("Hub", pushed.obstacle or "would accept the push"))
    else:
        # the URL of a commit is too long for a line
        rows += [("commit", pushed.commit), ("URL", str(pushed.url).partition("/commit/")[0])]
    title = "nothing to push: the Hub has all files" if pushed.is_unchanged else "pushed"
    title = title if pushed.commit is not None else "would be pushed"
    return Group(Facts(title, rows), *(sentence(f"note: {note}", "yellow") for note in pushed.notes))


def render_served(served: Served) -> RenderableType:
    """Render the URL and the model names of a server."""
    requests = "chat, responses, completions" if served.has_chat_template else "completions (no chat template)"
    model = [("model", served.model), *([("single paths", ", ".join(served.paths))] if served.paths else [])]
    return Facts("serving", [*model, ("base URL", served.url), ("requests", requests), ("stop", "Ctrl-C")])
