"""The interface of a way to grow a model; each way is a class in a module of its own, and a row of `methods`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from scale_surgery.errors import Problem
from scale_surgery.planning.base import Base
from scale_surgery.planning.costs import Costs, count_costs
from scale_surgery.planning.request import Request
from scale_surgery.planning.selection import format_layers
from scale_surgery.planning.specs import Collaboration, Spec, Widths
from scale_surgery.planning.tensors import NewTensor, TensorPlan, new_tensors

if TYPE_CHECKING:
    from scale_surgery.planning.plan import Plan


@dataclass(frozen=True)
class Resolved:
    """A request on a given model: layers to expand, widths to add, and where W12 exists."""

    layers: tuple[int, ...]
    widths: Widths = field(default_factory=Widths)
    collaboration: Collaboration = field(default_factory=Collaboration)


class Method(ABC):
    """A way to grow a model.

    Attributes:
        name: Its name in requests.
        variants: Its variants; the first is the default.
        options: Fields of a request that have a meaning for it alone, or for it and some other.
        verb: A participle for its layers, such as "expanded".
        preserving: Variants whose base stream stays the base model's, bit for bit, however they are trained.
        adds_layers: Whether the result is a stock checkpoint of more layers, which needs no code of ours.
        starts_at_zero: Whether W12 starts at zero, so that its norm is that of its change.
        refused: Operations that its models do not allow, each with the code of its problem.
        about_rows: Explanation of a row in tables of tensors, if needed.
        about_w12: Explanation of the change of W12; empty where it has none.
        opening: First sentence of a model card, by the form of the folder; the default is that of scale.
        title: Heading of the part of a card that tells what was done.
        source: Whose idea it is.
        citation: BibTeX of the paper.
        cites: Methods whose papers a card cites.
        about_loading: Text of a card on loading.
    """

    name: ClassVar[str]
    variants: ClassVar[tuple[str, ...]]
    options: ClassVar[tuple[str, ...]] = ()
    verb: ClassVar[str]
    preserving: ClassVar[tuple[str, ...]] = ()
    adds_layers: ClassVar[bool] = False
    starts_at_zero: ClassVar[bool] = True
    refused: ClassVar[Mapping[str, str]] = {}
    about_rows: ClassVar[str] = ""
    about_w12: ClassVar[str] = ""
    opening: ClassVar[Mapping[str, str]] = {}
    title: ClassVar[str] = "What was widened"
    source: ClassVar[str]
    citation: ClassVar[str]
    cites: ClassVar[tuple[str, ...]]
    about_loading: ClassVar[str] = ""

    def problems(self, request: Request) -> list[Problem]:
        """List problems with the values of its options, before the model is known."""
        return []

    def complete(self, request: Request) -> Request:
        """Fill in the defaults of the method."""
        return replace(request, variant=request.variant or self.variants[0])

    def config_problems(self, config: Mapping[str, Any]) -> list[Problem]:
        """List problems with a config.json, whatever its family."""
        return []

    @abstractmethod
    def resolve(self, base: Base, request: Request) -> Resolved:
        """Resolve a complete request against a base model."""

    @abstractmethod
    def specs(self, base: Base, request: Request, resolved: Resolved) -> Spec:
        """The key `scale_surgery` of the new config.json, as plain JSON values."""

    def new_tensors(self, base: Base, specs: Spec) -> Iterator[NewTensor]:
        """Every tensor that the specifications add; by default the tensors beside modules."""
        return new_tensors(base.architecture, base.sizes, specs, base.prefix, base.head, base.loaded)

    def costs(self, base: Base, request: Request, specs: Spec, tensors: Sequence[TensorPlan]) -> Costs:
        """Costs of a plan."""
        return count_costs(base, specs, tensors, request.svd)

    @abstractmethod
    def guards(self, plan: Plan) -> tuple[TensorPlan, ...]:
        """New tensors that keep the output the base's as long as they keep their initial values."""

    def is_exact_at_init(self, plan: Plan) -> bool:
        """Whether the output starts as the base's bit for bit, and not only up to rounding."""
        return True

    @abstractmethod
    def start(self, changed: int) -> str:
        """How the expansion starts, given how many of `guards` changed."""

    @abstractmethod
    def rows(self, plan: Plan) -> list[tuple[str, str]]:
        """Rows of a plan's table that only this method has."""

    def stock_form(self, plan: Plan) -> str | None:
        """The stock form in words, where the folder itself is one; otherwise None."""
        return None

    def refusal(self, operation: str, where: object = "") -> list[Problem]:
        """Return the problem of an operation that its models do not allow; nothing if they do."""
        return [Problem(self.refused[operation], where)] if operation in self.refused else []

    @abstractmethod
    def description(self, request: Request, *, is_stock: bool, has_up_stream: bool) -> str:
        """How a model is made, for its card."""

    @abstractmethod
    def beginning(self, request: Request) -> str:
        """How the new tensors began, for a card."""

    def card_rows(self, plan: Plan) -> list[tuple[str, str]]:
        """The plan as rows of a card's table."""
        layers, groups = plan.collaboration.layers, " and ".join(plan.collaboration.groups)
        widths, costs = plan.widths, plan.costs
        tokens = f"{widths.new_tokens:,}, with rows of their own; those of the base stay as they are"
        return [
            ("variant", f"`{plan.variant}`"),
            *([("new tokens", tokens)] if widths.new_tokens else []),
            ("expanded layers", f"{format_layers(plan.layers)} of 0-{plan.sizes.layers - 1}"),
            ("layers with W12", f"{format_layers(layers)} ({groups})" if layers else "none"),
            (
                "added widths",
                f"hidden state {widths.up_width}, key/value heads {widths.up_kv_heads}, inner {widths.up_inner_width}",
            ),
            ("parameters", parameters_row(costs)),
            ("start", self.beginning(plan.request)),
        ]


def parameters_row(costs: Costs) -> str:
    """Parameters of the base and new ones, for a card."""
    added, before = costs.parameters_added, costs.parameters_before
    return f"{before:,} of the base, {added:,} new ({added / before:.1%})"
