"""The request of a user: layers, method, widths, and how new tensors start."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from scale_surgery.checkpoint.expansions import DEFAULT_NAME
from scale_surgery.errors import PlanError, Problem
from scale_surgery.fields import NO_OPTION, fields_of, problems_of
from scale_surgery.planning.grow import COPIES
from scale_surgery.planning.methods import DEFAULT_METHOD, METHODS, variants
from scale_surgery.planning.new_tokens import NewTokens, problems_of_tokens
from scale_surgery.planning.scale import NO_LAYERS, RATIO, WIDTH
from scale_surgery.planning.selection import select_layers

ChosenInit = Literal["svd", "random", "zero"]


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
            none if one head is more than twice that share.
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
    method: str = field(default=DEFAULT_METHOD, metadata={"choices": lambda: METHODS})
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


def complete(request: Request, layers: int | None = None) -> Request:
    """Check a request, and fill in the defaults of its method: the variant, and how many copies."""
    # the command line checks the same, but Python callers and edited plans come here unchecked
    problems = problems_of(request, with_ranges=False)
    problems += problems_of_tokens(request.new_tokens) if request.new_tokens is not None else []
    if problems:
        raise PlanError(*problems)
    method = METHODS[request.method]
    problems = [*_foreign_problems(request), *method.problems(request)]
    if problems:
        raise PlanError(*problems, *_layer_problems(request, layers))
    # as a record gives it back
    return method.complete(replace(request, ratio=float(request.ratio)))


def _layer_problems(request: Request, layers: int | None) -> tuple[Problem, ...]:
    if request.layers == NO_LAYERS:
        return ()
    try:
        select_layers(request.layers, layers) if layers is not None else None
    except PlanError as error:
        return error.problems
    return ()


def _foreign_problems(request: Request) -> list[Problem]:
    """Find a variant of another method, and values that only other methods read."""
    asked, variant, variants = request.method, request.variant, METHODS[request.method].variants
    problems, known = list[Problem](), fields_of(Request)
    if variant not in (None, *variants):
        given = {"variant": variant, "variants": variants, "method": asked}
        problems.append(Problem("variant-of-other-method", "--variant", **given))
    options = [(owner, known[name]) for owner, method in METHODS.items() if owner != asked for name in method.options]
    problems += [
        Problem("option-of-other-method", option.typed, value=value, owner=owner)
        for owner, option in options
        if (value := getattr(request, option.name)) != option.default
    ]
    return problems
