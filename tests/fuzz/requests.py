"""Options: what a caller may ask for, and what no caller should."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

from scale_surgery import CosineRouter, PosteriorRouter, Request
from scale_surgery.fields import fields_of
from scale_surgery.modeling.expanded_routers import Router

NUMBERS = (-1, 0, 1, 2, 3, 7, 8, 40, 10**9, 2**63, 10**400, 0.5, 1.0, 1e-300, -0.0, math.nan, math.inf, -math.inf, True)
TEXTS = (
    *(
        "",
        "all",
        "0",
        "1",
        "-1",
        "0,1",
        "0-1",
        "1-0",
        "last:1",
        "every:2",
        "last:0",
        "last:9",
        "every:0",
        "1,1",
        "0-99999999",
    ),
    *(
        "9" * 5000,
        "-" * 50,
        "\u0663",
        "\u00b2",
        "0\n",
        " 1 ",
        "1;2",
        "\x1b[31m",
        "\ud800",
        "a\0b",
        "../x",
        "scale",
        "x" * 5000,
    ),
    *(
        "preserve",
        "adapt",
        "grow-train",
        "depth",
        "svd",
        "zero",
        "random",
        "float32",
        "float64",
        "both",
        "posterior",
        "cosine",
    ),
)
OTHERS = (None, [], {}, (), b"x", 3 + 4j, object)


def draw_request(dice: random.Random, *, is_odd: bool) -> Request:
    """What `plan` and `expand` are asked for; an odd one has one to three fields of any value."""
    usual = dice.choice(
        [
            Request("1"),
            Request("all", svd="exact"),
            Request("last:1", variant="adapt", collaborate="ffn", seed=dice.randrange(9)),
            Request("0", method="grow", copies=dice.choice([2, 3])),
            Request("0-1", method="depth"),
            Request("1", variant="adapt", up_width=0),
        ]
    )
    return _odd(dice, usual) if is_odd else usual


def draw_routing(dice: random.Random, *, is_odd: bool) -> Router:
    """How to route."""
    usual = dice.choice(
        [PosteriorRouter(), PosteriorRouter(switch_rate=0.05), CosineRouter(threshold=0.9, strict=True)]
    )
    return _odd(dice, usual) if is_odd else usual


def _odd(dice: random.Random, usual: Any) -> Any:
    names = [field.name for field in dataclasses.fields(usual) if field.init]
    chosen = dice.sample(names, dice.randint(1, min(3, len(names))))
    choices = (
        {} if isinstance(usual, Router) else {name: field.choices for name, field in fields_of(type(usual)).items()}
    )
    return dataclasses.replace(usual, **{name: _value(dice, choices.get(name, ())) for name in chosen})


def _value(dice: random.Random, choices: tuple[str, ...]) -> Any:
    pools = [NUMBERS, NUMBERS, TEXTS, TEXTS, OTHERS, *([choices, choices] if choices else [])]
    return dice.choice(dice.choice(pools))
