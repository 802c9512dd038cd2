"""Grow MLPs: the outputs of copies of an MLP add up to the original's (Grow, Don't Overwrite, arXiv 2603.08647)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from scale_surgery.errors import PlanError, Problem
from scale_surgery.planning.architecture import Architecture
from scale_surgery.planning.base import Base
from scale_surgery.planning.method import Method, Resolved
from scale_surgery.planning.request import COPIES, VARIANTS, Request
from scale_surgery.planning.selection import select_layers
from scale_surgery.planning.specs import Collaboration, Spec, Widths, build_specs
from scale_surgery.planning.tensors import TensorPlan

DEFAULT_COPIES = 2
# halving is exact in these, but for subnormal numbers
HALVING_DTYPES = ("F32", "BF16")


class Grow(Method):
    """The MLP of a chosen layer is there several times, and each counts its share."""

    name = "grow"
    variants = VARIANTS[name]
    options = ("copies",)
    verb = "grown"
    starts_at_zero = False
    refused: ClassVar[Mapping[str, str]] = {
        "quantised": "grown-on-quantised",
        "fuse": "grown-not-fused",
        "strength": "grown-not-dialled",
    }
    about_w12 = (
        "Norm of the change of W12, the copies' part of the down projection. Its initial values are the base's over "
        "the number of copies."
    )

    def problems(self, request: Request) -> list[Problem]:
        """Refuse fewer than two copies, and more than any model has."""
        if request.copies is None or request.copies in COPIES:
            return []
        return [Problem("copies-out-of-range", "--copies", copies=request.copies, range=COPIES)]

    def complete(self, request: Request) -> Request:
        """Two copies by default."""
        return replace(super().complete(request), copies=request.copies or DEFAULT_COPIES)

    def resolve(self, base: Base, request: Request) -> Resolved:
        """The copies of each layer; W12 of the down projection writes their output."""
        assert request.copies is not None
        layers = select_layers(request.layers, base.sizes.layers)
        inner = copied_inner(base.architecture, layers)
        return Resolved(layers, Widths(0, 0, (request.copies - 1) * inner), Collaboration(layers, ("ffn",)))

    def specs(self, base: Base, request: Request, resolved: Resolved) -> Spec:
        """The inner stream alone is widened, by linears that are copies."""
        specs = build_specs(
            base.architecture, base.sizes, resolved.widths, resolved.layers, resolved.collaboration, request.name
        )
        trains, copies = request.variant == "grow-train", request.copies or DEFAULT_COPIES
        if "kinds" in specs:
            kinds = [
                kind | {"expanded": grown_specs(kind["expanded"], copies, trains_base=trains)}
                for kind in specs["kinds"]
            ]
            grown: Spec = {"kinds": kinds}
        else:
            grown = {"expanded": grown_specs(specs["expanded"], copies, trains_base=trains)}
        return {**specs, **grown, "variant": request.variant, "dtype": None}

    def guards(self, tensors: Sequence[TensorPlan], head: Sequence[TensorPlan]) -> tuple[TensorPlan, ...]:
        """Every new tensor in a layer: each is a copy that has to stay one."""
        return tuple(tensor for tensor in tensors if tensor.layer is not None)

    def is_exact_at_init(self, request: Request, tensors: Sequence[TensorPlan]) -> bool:
        """Two copies count a half each, and halves are exact; other shares are rounded."""
        return request.copies == 2 and {tensor.dtype for tensor in tensors} <= set(HALVING_DTYPES)

    def start(self, changed: int) -> str:
        """Describe whether copies still equal the base's."""
        if not changed:
            return "copies are the base's"
        return "1 copy is not the base's" if changed == 1 else f"{changed} copies are not the base's"


def copied_inner(architecture: Architecture, layers: Sequence[int]) -> int:
    """Inner features of the MLPs that are copied, the same in all layers."""
    problems, widths = list[Problem](), set[int]()
    for layer in layers:
        blocks = [block for block in architecture.kind(layer).blocks if block.inner]
        widths |= {block.inner for block in blocks}
        if not blocks:
            reasons = [
                f"{block.name}: {block.reason}" for block in architecture.kind(layer).blocks if block.group == "ffn"
            ]
            problems.append(Problem("layer-without-mlp", "--layers", layer=layer, reasons=reasons or ["it has none"]))
    if len(widths) > 1:
        problems.append(Problem("mlps-unlike", "--layers", widths=sorted(widths)))
    if problems:
        raise PlanError(*problems)
    return widths.pop()


def grown_specs(specs: Spec, copies: int, *, trains_base: bool) -> Spec:
    """The linears of an expanded MLP as those of a grown one (arXiv 2603.08647)."""
    # what the base product of the down projection counts
    share = 1 / copies
    grown: Spec = {}
    for name, spec in specs.items():
        is_down = spec["kind"] == "linear" and spec["in_features"][1]
        # `trains_base` lets trained copies W11 take the place of W in gate and up projection
        settings = {"share": share} if is_down else {"trains_base": trains_base}
        grown[name] = {**spec, "kind": "grown", **settings} if spec["kind"] == "linear" else spec
    return grown
