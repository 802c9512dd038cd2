"""Widen layers: new blocks beside the base's, in attention and MLP, with an up stream (SCALE, arXiv 2511.03270)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from math import prod

from scale_surgery.errors import PlanError, Problem, counted
from scale_surgery.fields import fields_of
from scale_surgery.planning.architecture import Architecture, Kind, Sizes
from scale_surgery.planning.base import Base
from scale_surgery.planning.method import Method, Resolved
from scale_surgery.planning.request import NO_LAYERS, RATIO, VARIANTS, WIDTH, Request
from scale_surgery.planning.selection import format_layers, select_layers
from scale_surgery.planning.specs import Collaboration, Spec, Widths, build_specs
from scale_surgery.planning.tensors import TensorPlan

# inner features of an MLP over features of the residual stream
USUAL_INNER = 4
# a single key/value head may be so many times the share that the ratio asks for
MOST_OF_SHARE = 2
LEAST_WIDTH = 8


class Scale(Method):
    """New heads, inner features and an up stream beside the base's, as block matrices [W W12; W21 W22]."""

    name = "scale"
    variants = VARIANTS[name]
    options = (
        "collaborative_layers",
        "collaborate",
        "ratio",
        "up_width",
        "up_kv_heads",
        "up_inner_width",
        "init_w21",
        "init_w22",
        "init_embedding",
        "svd",
        "dtype",
    )
    verb = "expanded"
    preserving = ("preserve",)
    about_w12 = (
        "Norm of the change of W12 over all matrices of a group. W12 writes into the base stream. "
        "SCALE (arXiv 2511.03270) finds forgetting nearly linear in this norm."
    )

    def resolve(self, base: Base, request: Request) -> Resolved:
        """Resolve layers, widths and collaboration; widths that are not set follow from the ratio."""
        sizes, problems = base.sizes, list[Problem]()
        if request.layers == NO_LAYERS:
            if problems := _alone_problems(request):
                raise PlanError(*problems)
            return Resolved(())
        layers: tuple[int, ...] = ()
        try:
            layers = select_layers(request.layers, sizes.layers)
        except PlanError as error:
            problems += error.problems
        widths = resolve_widths(sizes, request)
        problems += _width_problems(sizes, request, widths)
        problems += _sealed_layers(base, request, layers, widths)
        collaboration, unmet = _resolve_collaboration(base.architecture, request, layers, widths)
        problems += unmet
        if problems:
            raise PlanError(*problems)
        resolved = Resolved(layers, widths, collaboration)
        return resolved if request.up_width is not None else self._with_cheap_head(base, request, resolved)

    def _with_cheap_head(self, base: Base, request: Request, resolved: Resolved) -> Resolved:
        """Lower the up width, in eights, until the head's new columns cost no more than all that layers get."""

        def with_width(up_width: int) -> Resolved:
            return replace(resolved, widths=replace(resolved.widths, up_width=up_width))

        def over(up_width: int) -> int:
            """Count how many parameters the head gets more than the layers."""
            tensors = list(self.new_tensors(base, self.specs(base, request, with_width(up_width))))
            head = sum(prod(tensor.shape) for tensor in tensors if tensor.kind == "head")
            return head - sum(prod(tensor.shape) for tensor in tensors if tensor.layer is not None)

        most = resolved.widths.up_width
        if most <= LEAST_WIDTH or over(most) <= 0:
            return resolved
        # both grow by as much with each feature
        least = over(LEAST_WIDTH)
        slope = (over(most) - least) / (most - LEAST_WIDTH)
        fitting = LEAST_WIDTH + int(-least / slope) // 8 * 8 if least < 0 else LEAST_WIDTH
        return with_width(fitting)

    def specs(self, base: Base, request: Request, resolved: Resolved) -> Spec:
        """Every module that is expanded, and how wide."""
        specs = build_specs(
            base.architecture, base.sizes, resolved.widths, resolved.layers, resolved.collaboration, request.name
        )
        kept = "float32" if request.dtype == "float32" else None
        return {**specs, "variant": request.variant, "dtype": kept}

    def guards(self, tensors: Sequence[TensorPlan], head: Sequence[TensorPlan]) -> tuple[TensorPlan, ...]:
        """W12 and the head's up part, which start at zero."""
        # by name, as the model's classes find them; the block in a record may be wrong
        heads = {tensor.name for tensor in head}
        return tuple(tensor for tensor in tensors if tensor.name.endswith(".w12") or tensor.name in heads)

    def start(self, changed: int) -> str:
        """Describe whether W12 and the head's up part are still zero."""
        if not changed:
            return "W12 and head up part are zero"
        return f"{counted(changed, 'tensor')} of W12 and the head's up part left zero"


def _alone_problems(request: Request) -> list[Problem]:
    """List why a request without layers cannot be met."""
    if not request.token_count:
        return [Problem("nothing-to-add", "--layers none")]
    fields = fields_of(type(request))
    widening = ("collaborative_layers", "collaborate", "up_width", "up_kv_heads", "up_inner_width")
    options = [fields[name].typed for name in widening if getattr(request, name)]
    beginnings = ("ratio", "init_w21", "init_w22", "init_embedding")
    options += [fields[name].typed for name in beginnings if getattr(request, name) != fields[name].default]
    options += [f"--variant {request.variant}"] if request.variant != "preserve" else []
    return [Problem("option-without-layers", option) for option in options]


def resolve_widths(sizes: Sizes, request: Request) -> Widths:
    """Return the added widths; those that the request leaves out follow from its ratio."""

    def given(value: int | None, default: int) -> int:
        return default if value is None else value

    # any other ratio, NaN too, is reported as a problem of the widths
    ratio = request.ratio if request.ratio in RATIO else 1.0

    def of_eight(features: int) -> int:
        return max(LEAST_WIDTH, round(features * ratio / 8) * 8)

    # beside a mixture of experts stands an MLP of usual proportions
    return Widths(
        given(request.up_width, of_eight(sizes.hidden)),
        given(request.up_kv_heads, default_kv_heads(sizes.key_value_heads, ratio)),
        given(request.up_inner_width, of_eight(sizes.inner or USUAL_INNER * sizes.hidden)),
    )


def default_kv_heads(heads: int, ratio: float) -> int:
    """Key/value heads that a ratio adds: whole ones, and none if a single one is more than twice the share."""
    # where no attention is split, no head can be added
    return max(round(heads * ratio), int(heads > 0 and MOST_OF_SHARE * ratio * heads >= 1))


def _width_problems(sizes: Sizes, request: Request, widths: Widths) -> list[Problem]:
    problems = list[Problem]()
    if request.ratio not in RATIO:
        problems.append(Problem("ratio-out-of-range", "--ratio", ratio=request.ratio, range=RATIO))
    for name, value in asdict(widths).items():
        if value not in WIDTH:
            problems.append(Problem("value-unfit", f"--{name.replace('_', '-')}", value=value, kind=WIDTH))
    if widths.up_kv_heads and not sizes.key_value_heads:
        problems.append(Problem("heads-closed", "--up-kv-heads", heads=widths.up_kv_heads))
    if not any(asdict(widths).values()):
        problems.append(Problem("widths-zero", "--up-width, --up-kv-heads and --up-inner-width"))
    return problems


def _sealed_layers(base: Base, request: Request, layers: tuple[int, ...], widths: Widths) -> list[Problem]:
    """Name the layers to which these widths add nothing: no heads, no inner features, and no MLP beside a block."""
    if not any(asdict(widths).values()):
        return []
    closed = tuple(layer for layer in layers if not _is_open(base.architecture.kind(layer), widths))
    if not closed:
        return []
    if widths.up_width:
        return [Problem("layers-whole", "--up-inner-width", layers=format_layers(closed))]
    return [Problem("layers-closed", "--up-width", layers=format_layers(closed))]


def _is_open(kind: Kind, widths: Widths) -> bool:
    if widths.up_width:
        return bool(widths.up_inner_width) or any(not block.is_whole for block in kind.blocks)
    return any(
        (block.query_heads and widths.up_kv_heads) or (block.inner and widths.up_inner_width) for block in kind.blocks
    )


def _resolve_collaboration(
    architecture: Architecture, request: Request, layers: tuple[int, ...], widths: Widths
) -> tuple[Collaboration, list[Problem]]:
    """Find the layers and groups in which W12 exists, and the parts of the request that cannot be met."""
    if request.variant == "preserve":
        return Collaboration((), ()), _preserve_problems(request, widths)
    problems, chosen, option = list[Problem](), layers, "--collaborative-layers"
    if request.collaborative_layers is not None:
        try:
            chosen = select_layers(request.collaborative_layers, len(architecture.kind_of_layer), option)
        except PlanError as error:
            problems += error.problems
    groups = _resolve_groups(request, widths)
    outside = tuple(sorted(set(chosen) - set(layers)))
    if layers and outside:
        place, names = f"{option} {request.collaborative_layers}", format_layers(outside)
        problems.append(Problem("layers-not-expanded", place, layers=names, expanded=format_layers(layers)))
    problems += _sealed_problems(layers, chosen, groups, widths)
    problems += [] if problems else _idle_problems(architecture, chosen, groups, widths)
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


def _preserve_problems(request: Request, widths: Widths) -> list[Problem]:
    problems = [Problem("preserve-without-up-stream", "--up-width")] if widths.up_width == 0 else []
    given = {"--collaborative-layers": request.collaborative_layers, "--collaborate": request.collaborate}
    options = ((option, value) for option, value in given.items() if value is not None)
    return problems + [Problem("option-of-adapt", option, value=value) for option, value in options]


def _sealed_problems(
    layers: tuple[int, ...], chosen: tuple[int, ...], groups: tuple[str, ...], widths: Widths
) -> list[Problem]:
    if widths.up_width:
        return []
    problems = list[Problem]()
    if set(layers) - set(chosen):
        names = {"layers": format_layers(chosen), "expanded": format_layers(layers)}
        problems.append(Problem("layers-without-way-out", "--collaborative-layers", **names))
    missing = [group for group in _needed_groups(widths) if group not in groups]
    if missing:
        problems.append(Problem("groups-without-way-out", "--collaborate", groups=missing))
    return problems


def _idle_problems(
    architecture: Architecture, chosen: tuple[int, ...], groups: tuple[str, ...], widths: Widths
) -> list[Problem]:
    """Refuse groups that none of the chosen layers has, such as attention in layers of MLPs alone."""
    blocks = [block for layer in chosen for block in architecture.kind(layer).blocks]
    open_groups = {block.group for block in blocks if not block.is_whole or widths.up_inner_width}
    if not (chosen and groups) or open_groups & set(groups):
        return []
    others = [f"--collaborate {group}" for group in sorted(open_groups)]
    ways = [*others, "other --collaborative-layers", "--variant preserve"]
    return [Problem("groups-closed", "--collaborate", groups=groups, layers=format_layers(chosen), ways=ways)]
