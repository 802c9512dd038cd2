"""Escapes for a model card: what a record says is text in it, and never a heading, a link, a row or HTML."""

from __future__ import annotations

import re

from scale_surgery.show.visible import visible_line

# with a backslash before them these are themselves; a colon and a dot, or an address would become a link by itself
SPECIAL = re.compile(r"[\\`*_\[\]<>&|~$@]|:(?=//)|(?<=www)\.", re.IGNORECASE)


def plain(text: object) -> str:
    """Anything as Markdown that reads as its text, in one line, with control characters shown by signs."""
    return SPECIAL.sub(lambda special: f"\\{special[0]}", visible_line(str(text)))


def code(text: object) -> str:
    """Anything as code in a line; as plain text where it has what ends code, or a cell of a table."""
    shown = visible_line(str(text)).strip()
    return plain(shown) if not shown or "`" in shown or "|" in shown else f"`{shown}`"
