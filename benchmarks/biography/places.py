"""The expansions that benchmarks/biography/layers.py compares: one kind each, in different places, as data."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Literal

from benchmarks.biography.methods import Method, expanded
from benchmarks.biography.train_model import ARCHITECTURE
from scale_surgery import Request

LAYERS: int = ARCHITECTURE["num_hidden_layers"]
RATE = 3e-3  # between those that benchmarks/biography/compare.py chooses for W12 in attention, and in attention and MLP
NORM_RATES = (1e-3, 1.7e-3, 3e-3)
GROW_RATE = 1e-3
# an expansion of the lowest layer adds columns to the embedding; where it is left out, a wider MLP has as many numbers
INNER_WIDTH, INNER_WIDTH_ABOVE = 32, 72
Scope = Literal["attn", "ffn", "both"]


def collaborate(scope: Scope, lowest: int) -> Method:
    """Describe an expansion of all layers, of the default widths, with W12 in the layers from `lowest` on."""
    if lowest == LAYERS:
        return Method("collaborate nowhere", partial(expanded, request=Request("all")), RATE)
    request = Request("all", variant="adapt", collaborate=scope, collaborative_layers=f"{lowest}-{LAYERS - 1}")
    return Method(f"collaborate {scope} {lowest}", partial(expanded, request=request), RATE)


def widen(layers: tuple[int, ...]) -> Method:
    """Describe SCALE-Adapt of some layers, with W12 in attention and MLP of each."""
    listed = ",".join(map(str, layers))
    inner_width = INNER_WIDTH if 0 in layers else INNER_WIDTH_ABOVE
    request = Request(listed, variant="adapt", collaborate="both", up_inner_width=inner_width)
    return Method(f"adapt layers {listed}", partial(expanded, request=request), RATE)


def grow(layers: tuple[int, ...]) -> Method:
    """Describe a copy of the MLP of some layers, which trains alone."""
    listed = ",".join(map(str, layers))
    request = Request(listed, method="grow", variant="grow-freeze")
    return Method(f"grow-freeze layers {listed}", partial(expanded, request=request), GROW_RATE)


PAIRS = tuple(itertools.combinations(range(LAYERS), 2))
# by what W12 stands in, and by L_fp
DEPTHS = {scope: {lowest: collaborate(scope, lowest) for lowest in range(LAYERS + 1)} for scope in ("attn", "both")}
NORM = {scope: collaborate(scope, LAYERS // 2) for scope in ("attn", "ffn")}
WIDENED = {pair: widen(pair) for pair in PAIRS}
GROWN = {pair: grow(pair) for pair in PAIRS}
PLACES = tuple(
    {
        method.name: method for methods in (*DEPTHS.values(), NORM, WIDENED, GROWN) for method in methods.values()
    }.values()
)
