"""The request of a user: layers, method, widths, and how new tensors start."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from scale_surgery.checkpoint.expansions import DEFAULT_NAME
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
    """What the user asks for; None means the default that the plan resolves and prints.

    Attributes:
        layers: Layers to expand, counted from 0: 20-31 (both included), 0,4,8, -1 (the last), last:4, every:4, all; or
            none, where new tokens are all that is added.
        method: scale adds new blocks, grow adds copies of the MLP, depth adds copies of whole layers.
        variant: What trains. scale: preserve (no W12, the default), adapt (W12 in the collaborative layers) or gated
            (the same, through gates that learn which text they leave to the base). grow: grow-freeze (the copies, the
            default) or grow-train (the original gate and up projections too). depth: depth.
        collaborative_layers: Layers with W12 (adapt, gated). Default: all expanded layers.
        collaborate: Where these layers have W12: in attention, in the MLP or in both (adapt, gated). Default: attn;
            with an up width of 0 wherever something is added.
        ratio: Added width as a share of the base's, for widths that are not given.
        up_width: Features added to the hidden size. Default: from the ratio, in eights; fewer if the new columns of
            the head would cost more parameters than the layers.
        up_kv_heads: Key/value heads added in each layer, each with its query heads. Default: from the ratio; none if
            one head is more than twice that share.
        up_inner_width: Features added inside each MLP. Default: from the ratio.
        init_w21: How W21 starts.
        init_w22: How W22 starts.
        init_embedding: How the new columns of the embedding start.
        svd: exact computes eigenvectors in float64, fast uses a randomized range finder.
        seed: Seed of everything random.
        dtype: Dtype of the new tensors. Default: that of the base tensor beside each.
        copies: MLPs in a grown layer, the original included (grow). Default: 2.
        name: What the expansion is called in the model: letters, digits and underscores.
        new_tokens: Tokens that are added to the base's tokenizer, with a row each in embedding and head.
        new_tokens_init: How the rows of new tokens start: pieces is the mean of the rows of what the base's tokenizer
            makes of the token.
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
