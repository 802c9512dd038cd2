"""What the user asks for, and what it resolves to on a given model: layers, widths, collaboration."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Literal

from scale_surgery.errors import PlanError
from scale_surgery.fields import Range, problems_of
from scale_surgery.planning.families import Sizes
from scale_surgery.planning.methods import DEFAULT_COPIES, METHODS, Method, Variant, all_variants
from scale_surgery.planning.selection import select_layers
from scale_surgery.planning.specs import Collaboration, Widths

Init = Literal["svd", "random", "zero"]

RATIO = Range(above=0, most=4)
WIDTH = Range(least=0)
COPIES = Range(least=2)


@dataclass(frozen=True)
class Request:
    """What the user asks for; None means the default that the plan resolves and prints.

    Attributes:
        layers: Layers to expand, counted from 0: 20-31 (both included), 0,4,8, -1 (the last), last:4, every:4, all.
        method: scale adds new blocks, grow adds copies of the MLP, depth adds copies of whole layers.
        variant: What trains. scale: preserve (no W12, the default) or adapt (W12 in the collaborative layers). grow:
            grow-freeze (the copies, the default) or grow-train (the original gate and up projections too). depth:
            depth.
        collaborative_layers: Layers with W12 (adapt). Default: all expanded layers.
        collaborate: Where these layers have W12: in attention, in the MLP or in both (adapt). Default: attn.
        ratio: Added width as a share of the base's, for widths that are not given.
        up_width: Features added to the hidden size, a multiple of the head size. Default: from the ratio.
        up_kv_heads: Key/value heads added in each layer, each with its query heads. Default: from the ratio.
        up_inner_width: Features added inside each MLP. Default: from the ratio.
        init_w21: How W21 starts.
        init_w22: How W22 starts.
        init_embedding: How the new columns of the embedding start.
        svd: exact computes eigenvectors in float64, fast uses a randomized range finder.
        seed: Seed of everything random.
        dtype: Dtype of the new tensors. Default: that of the base tensor beside each.
        copies: MLPs in a grown layer, the original included (grow). Default: 2.
    """

    layers: str
    method: Method = field(default="scale", metadata={"choices": lambda: METHODS})
    variant: Variant | None = field(default=None, metadata={"choices": all_variants})
    collaborative_layers: str | None = None
    collaborate: Literal["attn", "ffn", "both"] | None = None
    ratio: Annotated[float, RATIO] = 0.125
    up_width: Annotated[int, WIDTH] | None = None
    up_kv_heads: Annotated[int, WIDTH] | None = None
    up_inner_width: Annotated[int, WIDTH] | None = None
    init_w21: Init = "svd"
    init_w22: Init = "zero"
    init_embedding: Literal["svd", "zero"] = "svd"
    svd: Literal["exact", "fast"] = "fast"
    seed: int = 0
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    copies: Annotated[int, COPIES] | None = None


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
    problems = problems_of(request, with_ranges=False)
    if problems:
        raise PlanError.from_problems(problems)
    problems = _foreign_problems(request)
    if request.copies is not None and request.copies not in COPIES:
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


def _resolve_widths(sizes: Sizes, request: Request) -> Widths:
    def given(value: int | None, default: int) -> int:
        return default if value is None else value

    # any other ratio, NaN too, is reported as a problem of the widths
    ratio = request.ratio if request.ratio in RATIO else 1.0
    kv_heads = given(request.up_kv_heads, max(1, round(sizes.key_value_heads * ratio)))
    width = given(request.up_width, kv_heads * sizes.queries_per_key_value * sizes.head_size)
    inner = given(request.up_inner_width, max(8, round(sizes.inner * ratio / 8) * 8))
    return Widths(width, kv_heads, inner)


def _width_problems(sizes: Sizes, request: Request, widths: Widths) -> list[str]:
    problems = []
    if request.ratio not in RATIO:
        problems.append(f"--ratio is {request.ratio}, expected {RATIO} (0.125 is the default).")
    for option, value in asdict(widths).items():
        if value not in WIDTH:
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
