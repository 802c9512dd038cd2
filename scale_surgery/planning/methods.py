"""Ways to grow a model, as data: what variants each has, which options are its own, how its output is called.

scale  new blocks beside the base's, in attention and MLP, with an up stream (SCALE, arXiv 2511.03270)
grow   copies of the MLP that together give what the one gave (Grow, Don't Overwrite, arXiv 2603.08647)
depth  copies of whole blocks that at first add nothing (LLaMA Pro, arXiv 2401.02415)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from scale_surgery.errors import PlanError
from scale_surgery.planning.families import Family

Method = Literal["scale", "grow", "depth"]
Variant = Literal["preserve", "adapt", "grow-freeze", "grow-train", "depth"]


@dataclass(frozen=True)
class MethodFacts:
    """What is special about one method.

    Attributes:
        variants: What may train; the first is the default.
        options: Fields of a request that have a meaning for it alone, or for it and some other.
        verb: What it does to a layer, as a participle.
        is_stock: Whether the result is a checkpoint of the base's own architecture, which needs no code of ours.
    """

    variants: tuple[Variant, ...]
    options: tuple[str, ...]
    verb: str
    is_stock: bool = False


METHODS: Mapping[Method, MethodFacts] = {
    "scale": MethodFacts(
        variants=("preserve", "adapt"),
        options=(
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
        ),
        verb="expanded",
    ),
    "grow": MethodFacts(variants=("grow-freeze", "grow-train"), options=("copies",), verb="grown"),
    "depth": MethodFacts(variants=("depth",), options=(), verb="duplicated", is_stock=True),
}
DEFAULT_COPIES = 2


def all_variants() -> list[Variant]:
    """Variants of all methods."""
    return [variant for facts in METHODS.values() for variant in facts.variants]


def code_files(family: Family, method: Method) -> tuple[str, ...]:
    """Names of the Python files that a checkpoint carries."""
    return () if METHODS[method].is_stock else family.code_files


def method_of(plan: Mapping[str, Any]) -> Method:
    """The method of a plan in surgery.json.

    Raises:
        PlanError: If there is no such method.
    """
    method = plan["request"].get("method", "scale")
    if method not in METHODS:
        raise PlanError(f"plan.request.method is {method!r}, expected one of: {', '.join(METHODS)}")
    return cast(Method, method)
