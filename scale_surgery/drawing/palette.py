"""Colours of light and dark pages, of figures, and of the paths of a routed model."""

from __future__ import annotations

from typing import NamedTuple


class Palette(NamedTuple):
    """The colours of a page, as #rrggbb. Templates use them as variables of the same names."""

    background: str
    text: str
    muted: str
    line: str
    surface: str
    accent: str
    focus: str
    # the highest value in a table of numbers
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
# colours of figures: legible on white and on the dark page, and colour-blind-safe (Okabe and Ito 2008)
BLUE, VERMILION, GREY, INK = "#0072b2", "#d55e00", "#7b7b7b", "#222222"

# colours of paths, the base's first: hues of Okabe and Ito, light enough for dark text. They are colour-blind-safe;
# more than eight could not be distinguished.
PATH_COLOURS = ("#e4e6ea", "#f0654c", "#3791fe", "#9cbaab", "#b67eb4", "#5bd0fe", "#ffd047", "#eda303")
# colour of all further paths
OTHERS_COLOUR = "#b9bdc6"
# the same in a terminal with few colours
FEW_COLOURS = ("white", "yellow", "bright_blue", "green", "bright_magenta", "cyan", "bright_yellow", "bright_red")
