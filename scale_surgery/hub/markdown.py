"""Escapes for a model card: values of a record are text, and never become a heading, a link, a row or HTML."""

from __future__ import annotations

import re

from scale_surgery.visible import visible_line

# characters that need a backslash; a colon and a dot too, since Markdown turns bare addresses into links
SPECIAL = re.compile(r"[\\`*_\[\]<>&|~$@]|:(?=//)|(?<=www)\.", re.IGNORECASE)


def plain(text: object) -> str:
    """Return a value as one line of Markdown that renders as its text, with visible signs for control characters."""
    return SPECIAL.sub(lambda special: f"\\{special[0]}", visible_line(str(text)))


def code(text: object) -> str:
    """Return a value as inline code, or as plain text if it contains a backtick or a vertical bar."""
    shown = visible_line(str(text)).strip()
    return plain(shown) if not shown or "`" in shown or "|" in shown else f"`{shown}`"
