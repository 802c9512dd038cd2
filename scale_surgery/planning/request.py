"""What the user asks for, and what it resolves to on a given model: layers, widths, collaboration."""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import NoneType
from typing import Literal

from scale_surgery.errors import PlanError
from scale_surgery.planning.methods import DEFAULT_METHOD, METHODS, variants
from scale_surgery.planning.selection import select_layers

Init = Literal["svd", "random", "zero"]


# what a request may hold; the command line asks the same, a saved plan may have been edited
CHOICES: dict[str, tuple[str | None, ...]] = {
    "collaborate": ("attn", "ffn", "both", None),
    "init_w21": ("svd", "random", "zero"),
    "init_w22": ("svd", "random", "zero"),
    "init_embedding": ("svd", "zero"),
    "svd": ("exact", "fast"),
    "dtype": ("float32", "float16", "bfloat16", None),
}
KINDS: dict[str, tuple[type, ...]] = {
    "layers": (str,),
    "collaborative_layers": (str, NoneType),
    "ratio": (int, float),
    "up_width": (int, NoneType),
    "up_kv_heads": (int, NoneType),
    "up_inner_width": (int, NoneType),
    "copies": (int, NoneType),
    "seed": (int,),
}
KIND_NAMES = {
    (str,): "text",
    (str, NoneType): "text",
    (int, float): "a number",
    (int, NoneType): "a whole number",
    (int,): "a whole number",
}


@dataclass(frozen=True)
class Request:
    """What the user asks for; None means the default that the plan resolves and prints.

    Attributes:
        layers: Layers to expand, such as "20-31"; see `select_layers`.
        method: "scale" (new blocks), "grow" (copies of the MLP) or "depth" (copies of whole blocks).
        variant: What trains. Of scale "preserve" (no W12 anywhere, the default) or "adapt" (W12 in the collaborative
            layers); of grow "grow-freeze" (the copies, the default) or "grow-train" (the original gate and up too);
            of depth "depth".
        collaborative_layers: Layers with W12; default: all expanded layers. Only for adapt.
        collaborate: Where W12 stands in them: "attn" (default), "ffn" or "both". Only for adapt.
        ratio: Added width as a share of the base's, for what is not set below.
        up_width: Features added to the residual stream; 0 adds none.
        up_kv_heads: Key/value heads added, each with its query heads; 0 adds none.
        up_inner_width: Features added inside the MLP; 0 adds none.
        init_w21: How W21 starts.
        init_w22: How W22 starts.
        init_embedding: How the embedding's new columns start, "svd" or "zero".
        svd: "exact" (eigenvectors of the smaller Gram matrix, float64) or "fast" (randomized range finder).
        seed: Seed of everything random.
        dtype: Dtype of the new tensors; default: that of the tensor each stands beside.
        copies: How often the MLP of a grown layer is there, the original included. Only for grow; default: 2.
    """

    layers: str
    method: str = DEFAULT_METHOD
    variant: str | None = None
    collaborative_layers: str | None = None
    collaborate: Literal["attn", "ffn", "both"] | None = None
    ratio: float = 0.125
    up_width: int | None = None
    up_kv_heads: int | None = None
    up_inner_width: int | None = None
    init_w21: Init = "svd"
    init_w22: Init = "zero"
    init_embedding: Literal["svd", "zero"] = "svd"
    svd: Literal["exact", "fast"] = "fast"
    seed: int = 0
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    copies: int | None = None


def complete(request: Request, layers: int | None = None) -> Request:
    """Put in what a request leaves to its method: the variant, and how many copies.

    Args:
        request: What was asked for.
        layers: Layers of the model, where it is known; then its choice of layers is checked too.

    Returns:
        The same request, said in full.

    Raises:
        PlanError: If a value is none of those that it may be, or does not belong to the method; every one is named.
    """
    problems = _choice_problems(request)
    if problems:
        raise PlanError.from_problems(problems)
    method = METHODS[request.method]
    problems = [*_foreign_problems(request), *method.problems(request)]
    if problems:
        raise PlanError.from_problems([*problems, *_layer_problems(request, layers)])
    return method.complete(request)


def _layer_problems(request: Request, layers: int | None) -> list[str]:
    try:
        select_layers(request.layers, layers) if layers is not None else None
    except PlanError as error:
        return [str(error)]
    return []


def _foreign_problems(request: Request) -> list[str]:
    """What a request says that has no meaning for its method."""
    facts = METHODS[request.method]
    problems = []
    if request.variant not in (None, *facts.variants):
        problems.append(
            f"--variant is {request.variant}, expected {' or '.join(facts.variants)} for --method {request.method}."
        )
    defaults = {field.name: field.default for field in fields(Request)}
    for method, others in METHODS.items():
        for name in others.options if method != request.method else ():
            if getattr(request, name) != defaults[name]:
                problems.append(
                    f"--{name.replace('_', '-')} {getattr(request, name)} belongs to --method {method}, it has no "
                    f"meaning for {request.method}. Leave it out."
                )
    return problems


def _choice_problems(request: Request) -> list[str]:
    problems = []
    choices_now = {"method": tuple(METHODS), "variant": (*variants(), None), **CHOICES}
    for name, choices in choices_now.items():
        value = getattr(request, name)
        if value not in choices:
            listed = ", ".join(str(choice) for choice in choices if choice is not None)
            problems.append(f"--{name.replace('_', '-')} is {value!r}, expected one of: {listed}.")
    for name, kinds in KINDS.items():
        value = getattr(request, name)
        if isinstance(value, bool) or not isinstance(value, kinds):
            problems.append(f"--{name.replace('_', '-')} is {value!r}, expected {KIND_NAMES[kinds]}.")
    return problems
