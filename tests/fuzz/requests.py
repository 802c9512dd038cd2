"""Options: what a caller may ask for, and what no caller should."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

from scale_surgery import Request, Routing
from scale_surgery.fields import fields_of

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


def draw_routing(dice: random.Random, *, is_odd: bool) -> Routing:
    """How to route."""
    usual = dice.choice([Routing(), Routing(switch_rate=0.05), Routing("cosine", threshold=0.9, strict=True)])
    return _odd(dice, usual) if is_odd else usual


def _odd(dice: random.Random, usual: Any) -> Any:
    fields = list(fields_of(type(usual)).values())
    chosen = dice.sample(fields, dice.randint(1, min(3, len(fields))))
    values = {field.name: _value(dice, field.choices) for field in chosen}
    return dataclasses.replace(usual, **values)


def _value(dice: random.Random, choices: tuple[str, ...]) -> Any:
    pools = [NUMBERS, NUMBERS, TEXTS, TEXTS, OTHERS, *([choices, choices] if choices else [])]
    return dice.choice(dice.choice(pools))
