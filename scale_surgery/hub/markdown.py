"""Markdown of a model card: what a record says is text in it, and never a heading, a link, a row or HTML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from scale_surgery.show.visible import visible_line

# with a backslash before them these are themselves; a colon and a dot, or an address would become a link by itself
SPECIAL = re.compile(r"[\\`*_\[\]<>&|~$@]|:(?=//)|(?<=www)\.", re.IGNORECASE)
TICKS = re.compile("`+")


class Markdown(str):
    """A text that is Markdown already, made here or written in this program."""

    __slots__ = ()


def plain(text: object) -> Markdown:
    """What a record says, as a part of a line.

    Args:
        text: Anything, a number too.

    Returns:
        Markdown that reads as this text, in one line, with control characters shown by signs.
    """
    if isinstance(text, Markdown):
        return text
    return Markdown(SPECIAL.sub(lambda found: f"\\{found[0]}", visible_line(str(text))))


def code(text: object) -> Markdown:
    """What a record says, as code in a line; as plain text where it has what ends code, or a cell of a table."""
    shown = visible_line(str(text)).strip()
    return plain(shown) if not shown or TICKS.search(shown) or "|" in shown else Markdown(f"`{shown}`")


def link(text: str, address: str) -> Markdown:
    """A link to an address that holds letters, digits and the signs of file names alone."""
    return Markdown(f"[{plain(text)}]({address})")


def joined(parts: Iterable[object], between: str = ", ") -> Markdown:
    """Parts of a line in one."""
    return Markdown(between.join(map(plain, parts)))


def table(head: str, rows: Iterable[Sequence[object]]) -> str:
    """A table.

    Args:
        head: Its two first lines.
        rows: Cells; what is not Markdown is shown as it is.

    Returns:
        Lines, one for each row.
    """
    return "\n".join([head, *(f"| {joined(row, ' | ')} |" for row in rows)])
