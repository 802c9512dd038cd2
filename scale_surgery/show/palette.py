"""Colours from the preserve path (blue) to the adapt path (orange), which people with any colour vision tell apart.

The middle is neither. Each half is told by its hue; where there is none, in print say, orange is the darker one, and
the page underlines it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# places on the scale, an odd number: 0 is the preserve path alone, the last one the adapt path alone
PLACES = 21


@dataclass(frozen=True)
class Palette:
    """What a page is coloured with; each colour as #rrggbb.

    Attributes:
        background: Behind everything.
        text: Of the text, on the page and on every colour of the scale.
        muted: Of what is beside the text.
        line: Of lines between things.
        surface: Behind what lies on the page.
        adapt: Of the line below tokens that come from the adapt path.
        focus: Around the token that is looked at.
        stops: Preserve path, neither, adapt path.
    """

    background: str
    text: str
    muted: str
    line: str
    surface: str
    adapt: str
    focus: str
    stops: tuple[str, str, str]

    def scale(self) -> list[str]:
        """Colours of all places."""
        half = PLACES // 2
        preserve, middle, adapt = self.stops
        lower = [_between(preserve, middle, place / half) for place in range(half)]
        return lower + [_between(middle, adapt, place / half) for place in range(half + 1)]


LIGHT = Palette(
    background="#ffffff",
    text="#16181d",
    muted="#565c66",
    line="#d5d8de",
    surface="#f6f7f9",
    adapt="#b34700",
    focus="#16181d",
    stops=("#a6d3f5", "#f0efed", "#f2994a"),
)
DARK = Palette(
    background="#14161a",
    text="#f4f5f7",
    muted="#a3abb8",
    line="#363b44",
    surface="#1d2026",
    adapt="#ffa25c",
    focus="#ffffff",
    stops=("#155a8f", "#30343b", "#9c4a08"),
)


def place_of(share: float) -> int:
    """Find the place of a number from 0, the preserve path, to 1, the adapt path; NaN is neither."""
    if math.isnan(share):
        return PLACES // 2
    return round(min(1.0, max(0.0, share)) * (PLACES - 1))


def parse_colour(colour: str) -> tuple[int, int, int]:
    """Split #rrggbb into red, green and blue, 0 to 255."""
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return red, green, blue


def _between(one: str, other: str, share: float) -> str:
    mixed: Sequence[int] = [
        round(a + (b - a) * share) for a, b in zip(parse_colour(one), parse_colour(other), strict=True)
    ]
    return "#" + "".join(f"{part:02x}" for part in mixed)
