"""The interface of a way to grow a model; each way is a class in a module of its own, and a row of `methods`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from scale_surgery.errors import Problem
from scale_surgery.planning.base import Base
from scale_surgery.planning.costs import Costs, count_costs
from scale_surgery.planning.request import Request
from scale_surgery.planning.specs import Collaboration, Spec, Widths
from scale_surgery.planning.tensors import NewTensor, TensorPlan, new_tensors


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

    def problems(self, request: Request) -> list[Problem]:
        """List problems with the values of its options, before the model is known."""
        return []

    def complete(self, request: Request) -> Request:
        """Fill in the defaults of the method."""
        return replace(request, variant=request.variant or self.variants[0])

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
    def guards(self, tensors: Sequence[TensorPlan], head: Sequence[TensorPlan]) -> tuple[TensorPlan, ...]:
        """Return the new tensors that keep the output the base's as long as they keep their initial values."""

    def is_exact_at_init(self, request: Request, tensors: Sequence[TensorPlan]) -> bool:
        """Return True if the initial output equals the base's bit for bit, not only up to rounding."""
        return True

    @abstractmethod
    def start(self, changed: int) -> str:
        """How the expansion starts, given how many of `guards` changed."""

    def refusal(self, operation: str, where: object = "") -> list[Problem]:
        """Return the problem of an operation that its models do not allow; nothing if they do."""
        return [Problem(self.refused[operation], where)] if operation in self.refused else []
