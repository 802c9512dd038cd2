"""What leaves for others looks like, pushed or served; see `tables`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from scale_surgery.show.layout import Facts, NamedRows, heading, sentence
from scale_surgery.show.tables import facts, format_bytes

if TYPE_CHECKING:
    from scale_surgery.hub.push import Pushed
    from scale_surgery.running.serve import Served

ORIGINS = {"base": "the base's, as it is", "model": "", "written": "written for the repository"}
FORMS = {
    "expanded": "expanded model",
    "extract": "expansion without its base",
    "stock": "stock checkpoint",
}
CARDS = {"written": "from facts", "own": "your own", "kept": "the one in the repository stays"}


def render_files(found: Pushed) -> RenderableType:
    """What a repository gets, file by file, and what it does not get."""
    table = NamedRows(["", ""], left=(2,))
    for file in found.files:
        table.add_row(file.name, format_bytes(file.bytes), ORIGINS[file.origin])
    rows: list[RenderableType] = [sentence(f"left out: {name}", "yellow") for name in found.left_out]
    rows += [sentence(f"leaves the repository: {name}", "yellow") for name in found.removed]
    return Group(heading("files"), table, *rows, Text())


def render_pushed(found: Pushed) -> RenderableType:
    """What was pushed, or would be."""
    base = sum(file.bytes for file in found.files if file.origin == "base")
    own = format_bytes(base)
    visible = "private" if found.is_private else "public"
    rows = [
        ("repository", f"{found.repo}, {visible}"),
        ("holds", FORMS[found.form]),
        (
            "files",
            f"{len(found.files)}, {format_bytes(found.bytes)}" + (f"; {own} of it are the base's own" if base else ""),
        ),
        ("card", CARDS[found.card_origin]),
        ("checked", "bytes and structure" if found.is_checked else "no (--no-verify)"),
    ]
    if found.commit is None:
        rows.append(("Hub", found.obstacle or "would take it"))
    else:
        # the address of a commit fits no line
        rows += [("commit", found.commit), ("see", str(found.url).partition("/commit/")[0])]
    pushed = "nothing to push: the Hub has it all" if found.is_unchanged else "pushed"
    title = pushed if found.commit is not None else "would be pushed"
    return Group(facts(title, rows), *(sentence(f"note: {note}", "yellow") for note in found.notes))


def render_served(served: Served) -> RenderableType:
    """Where a model is served, and by which name."""
    requests = "chat, responses, completions" if served.has_chat_template else "completions; it has no chat template"
    model = [("model", served.model), *([("or alone", ", ".join(served.paths))] if served.paths else [])]
    return Facts("serving", [*model, ("base URL", served.url), ("requests", requests), ("stop", "Ctrl-C")])
