"""Colours of pages, light and dark."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Palette:
    """What a page is coloured with; each colour as #rrggbb.

    Attributes:
        background: Behind everything.
        text: Of the text.
        muted: Of what is beside the text.
        line: Of lines between things.
        surface: Behind what lies on the page.
        accent: Of what can be chosen.
        focus: Around the token that is looked at.
        heat: Of the highest value in a table of numbers.
    """

    background: str
    text: str
    muted: str
    line: str
    surface: str
    accent: str
    focus: str
    heat: str


LIGHT = Palette(
    background="#ffffff",
    text="#16181d",
    muted="#565c66",
    line="#d5d8de",
    surface="#f6f7f9",
    accent="#b34700",
    focus="#16181d",
    heat="#a6d3f5",
)
DARK = Palette(
    background="#14161a",
    text="#f4f5f7",
    muted="#a3abb8",
    line="#363b44",
    surface="#1d2026",
    accent="#ffa25c",
    focus="#ffffff",
    heat="#155a8f",
)


def parse_colour(colour: str) -> tuple[int, int, int]:
    """Split #rrggbb into red, green and blue, 0 to 255."""
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return red, green, blue
