"""What the user asks for, and what it resolves to on a given model: layers, widths, collaboration."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from types import NoneType
from typing import Literal

from scale_surgery.errors import PlanError
from scale_surgery.planning.families import Sizes
from scale_surgery.planning.methods import DEFAULT_COPIES, METHODS, VARIANTS, Method, Variant
from scale_surgery.planning.selection import select_layers
from scale_surgery.planning.specs import Collaboration, Widths

Init = Literal["svd", "random", "zero"]


# what a request may hold; the command line asks the same, a saved plan may have been edited
CHOICES: dict[str, tuple[str | None, ...]] = {
    "method": tuple(METHODS),
    "variant": (*VARIANTS, None),
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
    method: Method = "scale"
    variant: Variant | None = None
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
    problems = _foreign_problems(request)
    if request.copies is not None and request.copies < 2:
        problems.append(
            f"--copies is {request.copies}, expected 2 or more: the original is one of them, and 1 adds nothing."
        )
    if problems:
        raise PlanError.from_problems([*problems, *_layer_problems(request, layers)])
    copies = request.copies or (DEFAULT_COPIES if request.method == "grow" else None)
    return replace(request, variant=request.variant or METHODS[request.method].variants[0], copies=copies)


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


def resolve(sizes: Sizes, request: Request) -> tuple[tuple[int, ...], Widths, Collaboration]:
    """Resolve a request against the sizes of a base model.

    Args:
        sizes: Sizes of the base model.
        request: What was asked for, in full; see `complete`.

    Returns:
        The layers to expand, the widths to add, and where W12 exists.

    Raises:
        PlanError: If the request does not fit the model; every problem is listed.
    """
    if request.method != "scale":
        layers = select_layers(request.layers, sizes.layers)
        added = (request.copies - 1) * sizes.inner if request.copies else 0
        # what a grown layer adds is written by W12 of its down projection, and by nothing else
        return layers, Widths(0, 0, added), Collaboration(layers, ("ffn",)) if added else Collaboration((), ())
    problems: list[str] = []
    layers = ()
    try:
        layers = select_layers(request.layers, sizes.layers)
    except PlanError as error:
        problems.append(str(error))
    widths = _resolve_widths(sizes, request)
    problems += _width_problems(sizes, request, widths)
    collaboration, found = _resolve_collaboration(sizes, request, layers, widths)
    problems += found
    if problems:
        raise PlanError.from_problems(problems)
    return layers, widths, collaboration


def _choice_problems(request: Request) -> list[str]:
    problems = []
    for name, choices in CHOICES.items():
        value = getattr(request, name)
        if value not in choices:
            listed = ", ".join(str(choice) for choice in choices if choice is not None)
            problems.append(f"--{name.replace('_', '-')} is {value!r}, expected one of: {listed}.")
    for name, kinds in KINDS.items():
        value = getattr(request, name)
        if isinstance(value, bool) or not isinstance(value, kinds):
            problems.append(f"--{name.replace('_', '-')} is {value!r}, expected {KIND_NAMES[kinds]}.")
    return problems


def _resolve_widths(sizes: Sizes, request: Request) -> Widths:
    def given(value: int | None, default: int) -> int:
        return default if value is None else value

    # any other ratio, NaN too, is reported as a problem of the widths
    ratio = request.ratio if 0 < request.ratio <= 4 else 1.0
    kv_heads = given(request.up_kv_heads, max(1, round(sizes.key_value_heads * ratio)))
    width = given(request.up_width, kv_heads * sizes.queries_per_key_value * sizes.head_size)
    inner = given(request.up_inner_width, max(8, round(sizes.inner * ratio / 8) * 8))
    return Widths(width, kv_heads, inner)


def _width_problems(sizes: Sizes, request: Request, widths: Widths) -> list[str]:
    problems = []
    if not 0 < request.ratio <= 4:
        problems.append(f"--ratio is {request.ratio}, expected more than 0 and at most 4 (0.125 is the default).")
    for option, value in asdict(widths).items():
        if value < 0:
            problems.append(f"--{option.replace('_', '-')} is {value}, expected 0 or more.")
    if widths.up_width > 0 and widths.up_width % sizes.head_size:
        problems.append(
            f"--up-width is {widths.up_width}, expected a multiple of the head size {sizes.head_size}, "
            f"such as {-(-widths.up_width // sizes.head_size) * sizes.head_size}."
        )
    if not any(asdict(widths).values()):
        problems.append("--up-width, --up-kv-heads and --up-inner-width are all 0: there is nothing to add.")
    return problems


def _resolve_collaboration(
    sizes: Sizes, request: Request, layers: tuple[int, ...], widths: Widths
) -> tuple[Collaboration, list[str]]:
    if request.variant == "preserve":
        return Collaboration((), ()), _preserve_problems(request, widths)
    problems: list[str] = []
    chosen = layers
    if request.collaborative_layers is not None:
        try:
            chosen = select_layers(request.collaborative_layers, sizes.layers, "--collaborative-layers")
        except PlanError as error:
            problems.append(str(error))
    groups = _resolve_groups(request, widths)
    outside = sorted(set(chosen) - set(layers))
    if layers and outside:
        problems.append(
            f"--collaborative-layers {request.collaborative_layers}: {', '.join(map(str, outside))} not among the "
            f"expanded layers. Choose among --layers {request.layers}."
        )
    problems += _sealed_problems(layers, chosen, groups, widths)
    return Collaboration(chosen, groups), problems


def _resolve_groups(request: Request, widths: Widths) -> tuple[str, ...]:
    if request.collaborate == "both":
        return ("attn", "ffn")
    if request.collaborate is not None:
        return (request.collaborate,)
    if widths.up_width:
        return ("attn",)
    # without an up stream W12 is the only way out of what is added
    return _needed_groups(widths)


def _needed_groups(widths: Widths) -> tuple[str, ...]:
    return (("attn",) if widths.up_kv_heads else ()) + (("ffn",) if widths.up_inner_width else ())


def _preserve_problems(request: Request, widths: Widths) -> list[str]:
    problems = []
    if widths.up_width == 0:
        problems.append(
            "--up-width is 0 with --variant preserve: without an up stream, W12 is the only way out of the new "
            "heads and the new inner features, and preserve has none. Use --variant adapt, or an --up-width."
        )
    for option, value in (
        ("--collaborative-layers", request.collaborative_layers),
        ("--collaborate", request.collaborate),
    ):
        if value is not None:
            problems.append(f"{option} {value} with --variant preserve: it has no W12. Use --variant adapt.")
    return problems


def _sealed_problems(
    layers: tuple[int, ...], chosen: tuple[int, ...], groups: tuple[str, ...], widths: Widths
) -> list[str]:
    if widths.up_width:
        return []
    problems = []
    if set(layers) - set(chosen):
        problems.append("--up-width is 0: every expanded layer must be in --collaborative-layers.")
    missing = [group for group in _needed_groups(widths) if group not in groups]
    if missing:
        problems.append(
            f"--up-width is 0 and --collaborate leaves out {' and '.join(missing)}: what is added there would have "
            "no way out. Use --collaborate both, or add nothing there."
        )
    return problems
