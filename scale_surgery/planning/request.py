"""The request of a user: layers, method, widths, and how new tensors start."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass, field
from typing import Annotated, Literal

from scale_surgery.checkpoint.expansions import DEFAULT_NAME
from scale_surgery.errors import PlanError, Problem
from scale_surgery.fields import NO_OPTION, Range
from scale_surgery.planning.new_tokens import NewTokens

# the variants of each method; the first is its default
VARIANTS: dict[str, tuple[str, ...]] = {
    "scale": ("preserve", "adapt", "gated"),
    "grow": ("grow-freeze", "grow-train"),
    "depth": ("depth",),
}
DEFAULT_METHOD = "scale"
# --layers if only new tokens are added
NO_LAYERS = "none"
RATIO = Range(above=0, most=4)
# the largest width is beyond any model, and its costs are still numbers
WIDTH = Range(least=0, most=10**7)
# the largest number of copies is beyond any model
COPIES = Range(least=2, most=1000)
ChosenInit = Literal["svd", "random", "zero"]


def variants() -> tuple[str, ...]:
    """List the variants of all methods."""
    return tuple(variant for of_method in VARIANTS.values() for variant in of_method)


@dataclass(frozen=True)
class Request:
    """A request of the user; None means the default, which the plan resolves and prints.

    Attributes:
        layers: Layers to expand, counted from 0: 20-31 (both included), 0,4,8, -1 (the last), last:4, every:4, all. Use
            none to add only new tokens.
        method: Kind of expansion. scale adds new blocks, grow adds copies of the MLP, depth adds copies of whole
            layers.
        variant: Variant of the method. preserve (default of scale): no W12. adapt: W12 in the collaborative layers.
            gated: as adapt, with trained gates that close on old text. grow-freeze (default of grow): only the copies
            train. grow-train: the original gate and up projections train too. depth: the only variant of depth.
        collaborative_layers: Layers with W12 (adapt, gated). Default: all expanded layers.
        collaborate: Parts of the collaborative layers with W12: attention, MLP or both (adapt, gated). Default: attn,
            or all expanded parts if the up width is 0.
        ratio: Added width as a share of the base's. It sets all widths that are not given.
        up_width: Features to add to the hidden size. Default: from the ratio, a multiple of 8. Exception: fewer if the
            new columns of the head would cost more parameters than the layers.
        up_kv_heads: Key/value heads to add in each layer, with their query heads. Default: from the ratio. Exception:
            none if one head would add more than twice the ratio.
        up_inner_width: Features to add inside each MLP. Default: from the ratio.
        init_w21: Initial values of W21.
        init_w22: Initial values of W22.
        init_embedding: Initial values of the new embedding columns.
        svd: Algorithm of the SVD: exact computes eigenvectors in float64, fast uses a randomized range finder.
        seed: Seed of all random numbers.
        dtype: Dtype of the new tensors. Default: the dtype of the base tensor next to each.
        copies: MLPs in a grown layer, including the original (grow). Default: 2.
        name: Name of the expansion: letters, digits and underscores.
        new_tokens: Tokens to add to the base's tokenizer, with a row each in embedding and head.
        new_tokens_init: Initial rows of new tokens. pieces: the mean of the rows of the token's pieces in the base's
            tokenizer.
    """

    layers: str
    method: str = field(default=DEFAULT_METHOD, metadata={"choices": lambda: VARIANTS})
    variant: str | None = field(default=None, metadata={"choices": variants})
    collaborative_layers: str | None = None
    collaborate: Literal["attn", "ffn", "both"] | None = None
    ratio: Annotated[float, RATIO] = 0.125
    up_width: Annotated[int, WIDTH] | None = None
    up_kv_heads: Annotated[int, WIDTH] | None = None
    up_inner_width: Annotated[int, WIDTH] | None = None
    init_w21: ChosenInit = field(default="svd", metadata=NO_OPTION)
    init_w22: ChosenInit = field(default="zero", metadata=NO_OPTION)
    init_embedding: Literal["svd", "zero"] = field(default="svd", metadata=NO_OPTION)
    svd: Literal["exact", "fast"] = field(default="fast", metadata=NO_OPTION)
    seed: int = field(default=0, metadata=NO_OPTION)
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    copies: Annotated[int, COPIES] | None = None
    name: str = DEFAULT_NAME
    new_tokens: NewTokens | None = field(default=None, metadata=NO_OPTION)
    new_tokens_init: Literal["pieces", "random", "zero"] = "pieces"

    @property
    def token_count(self) -> int:
        """How many tokens are added."""
        return len(self.new_tokens.tokens) if self.new_tokens is not None else 0


def check_is_request(given: object) -> None:
    """Check that a Python caller gave a request, and not its values."""
    if not isinstance(given, Request):
        raise PlanError(Problem("value-unfit", "request", value=reprlib.repr(given), kind=Request.__name__))
