"""Methods as data: what makes a model of a base, and the middle of the learning rates that are tried.

Expansions are made as by `expand`, adapters by PEFT. A method adds nothing to the loop that trains it, except the model
that own samples keep it close to: its base inside, or a second copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from scale_surgery.checkpoint.folder import Checkpoint, open_checkpoint
from scale_surgery.checkpoint.locks import locked_scratch
from scale_surgery.checkpoint.sources import Source
from scale_surgery.comparing.settings import CompareSettings
from scale_surgery.deriving.planned import make_plan
from scale_surgery.errors import PlanError, Problem
from scale_surgery.learning.learn import count_layers
from scale_surgery.learning.presets import last_layers
from scale_surgery.modeling.expanded_routers import PosteriorRouter
from scale_surgery.planning.base import check_is_base
from scale_surgery.planning.request import Request
from scale_surgery.running.freeze import expansion_disabled
from scale_surgery.running.loading import loaded_whole, quiet_transformers, translated
from scale_surgery.running.options import RunOptions
from scale_surgery.surgery.expand import expand
from scale_surgery.surgery.route import route_export
from scale_surgery.training.rates import OF_WHOLE_MATRICES, RATE_TIMES_WIDTH, default_rate

# of a number in float32
BYTES = 4


@dataclass(frozen=True)
class Place:
    """A base and the folder of its comparison."""

    checkpoint: Checkpoint
    name: str
    folder: Path
    settings: CompareSettings
    run: RunOptions

    @classmethod
    def open(cls, source: Source, folder: Path, settings: CompareSettings, run: RunOptions) -> Place:
        """Open a base that is there; models are in float32, so that all of a method's parameters can be trained."""
        checkpoint = open_checkpoint(source.path)
        check_is_base(checkpoint, source.name)
        return cls(checkpoint, source.name, folder, settings, replace(run.placed(), dtype="float32"))

    @property
    def numbers(self) -> int:
        """Return how many numbers the base's tensors hold."""
        return sum(math.prod(info.shape) for info in self.checkpoint.tensors.values())

    @property
    def embedded(self) -> int:
        """Return how many of them are in matrices with a row for each token."""
        config = self.checkpoint.config
        rows = (config if "vocab_size" in config else config.get("text_config") or {}).get("vocab_size")
        shapes = (info.shape for info in self.checkpoint.tensors.values())
        return sum(math.prod(shape) for shape in shapes if tuple(shape[:1]) == (rows,))

    def served_bytes(self, model: Any) -> int:
        """Return the bytes of a model's weights, stored as those of the base are."""
        size = sum(info.bytes for info in self.checkpoint.tensors.values()) / self.numbers
        parameters: int = sum(parameter.numel() for parameter in model.parameters())
        return round(size * parameters)

    @contextmanager
    def base(self) -> Iterator[Any]:
        """Load the base."""
        with loaded_whole(self.checkpoint, self.name, self.run) as model:
            yield model


@dataclass(frozen=True)
class Made:
    """A model to train.

    Attributes:
        model: The model, whose trained parameters require gradients.
        inside: The same without a wrapper of PEFT.
        rate: The middle of the learning rates to try.
        base: The model that own samples keep it close to; with `alone` in effect.
        alone: Disables what was added to the base.
        measuring: Puts the model into the form that is served.
        served: Returns the model that is served.
    """

    model: Any
    inside: Any
    rate: float
    base: Any
    alone: Callable[[], AbstractContextManager[Any]]
    measuring: Callable[[], AbstractContextManager[Any]] = nullcontext
    served: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Method:
    """A way to learn.

    Attributes:
        make: Makes its model.
        about: Description for people.
        kind: "whole", trained as it is; "adapter", by PEFT; or "expansion".
        rehearses: True if it is kept close to the base on own samples.
        overwrites: True if the base's own weights learn. Then that needs a second copy of the base in memory.
        copies: Copies of the base's weights that training takes at least. `full` takes five: the model, its gradient,
            two moments of AdamW, and the base. `osf` takes six or seven of each matrix.
        embedding_copies: Copies of an embedding or head, if they are others.
    """

    make: Callable[[Place], AbstractContextManager[Made]]
    about: str
    kind: Literal["whole", "adapter", "expansion"] = "expansion"
    rehearses: bool = True
    overwrites: bool = False
    copies: int = 1
    embedding_copies: int | None = None

    def least_bytes(self, place: Place) -> int:
        """Return bytes that training takes at least, in float32. Activations, and what a method adds, come on top."""
        copies = self.copies if self.embedding_copies is None else self.embedding_copies
        return BYTES * (self.copies * (place.numbers - place.embedded) + copies * place.embedded)


def _width(model: Any) -> int:
    width: int = model.config.get_text_config(decoder=True).hidden_size
    return width


@contextmanager
def _whole(place: Place) -> Iterator[Made]:
    with place.base() as model, place.base() as base:
        model.requires_grad_(True)
        yield Made(model, model, OF_WHOLE_MATRICES * RATE_TIMES_WIDTH / _width(model), base, nullcontext)


def _on_mlps(place: Place) -> list[str]:
    """Return the linear layers of MLPs, those that grow copies, as modules of the model."""
    # whole names: in GPT-2, attention has a `c_proj` too
    try:
        plan = make_plan(place.checkpoint, Request("all", method="grow"), name=place.name, run=place.run)
    except PlanError as error:  # its fixes are options of `expand`
        problems = (Problem("method-refused", problem.where, error=problem.found) for problem in error.problems)
        raise PlanError(*problems) from error
    layers = plan.architecture.layers_path
    return [f"{layers}.{layer}.{name}" for layer in plan.layers for name in plan.expanded_linears(layer)]


@contextmanager
def _adapted(place: Place, *, has_subspaces: bool = False) -> Iterator[Made]:
    from peft import LoraConfig, OSFConfig, get_peft_model

    rank = place.settings.rank
    with ExitStack() as stack:
        model = stack.enter_context(place.base())
        torch.manual_seed(place.settings.seed)
        if has_subspaces:
            config: Any = OSFConfig(target_modules="all-linear")
        else:
            config = LoraConfig(r=rank, lora_alpha=rank, target_modules=_on_mlps(place))
        rate = RATE_TIMES_WIDTH / _width(model)
        with quiet_transformers(), translated("method-refused", place.name):
            wrapped: Any = get_peft_model(model, config)
        if not any(parameter.requires_grad for parameter in wrapped.parameters()):
            raise PlanError(Problem("method-without-layers", "--methods", model=place.name))
        merged = wrapped.merge_and_unload
        if has_subspaces:
            base = stack.enter_context(place.base())
            yield Made(wrapped, wrapped.get_base_model(), OF_WHOLE_MATRICES * rate, base, nullcontext, served=merged)
        else:
            yield Made(wrapped, wrapped.get_base_model(), rate, wrapped, wrapped.disable_adapter, served=merged)


@contextmanager
def _expanded(place: Place, *, request: Request, is_routed: bool = False) -> Iterator[Made]:
    layers = request.layers or last_layers(count_layers(place.checkpoint, place.run))
    with locked_scratch(place.folder / "model") as folder:
        made = folder / "expanded"
        asked = replace(request, layers=layers, seed=place.settings.seed)
        done = expand(place.checkpoint.path, asked, made, run=place.run)
        if is_routed:
            made = route_export(made, folder / "routed", PosteriorRouter()).path
        with loaded_whole(made, place.name, place.run) as model, ExitStack() as stack:
            measuring: Callable[[], AbstractContextManager[Any]] = nullcontext
            if is_routed:
                measuring = model.routing_enabled
                stack.enter_context(model.routing_disabled())
            rate = default_rate(done.plan)
            yield Made(model, model, rate, model, partial(expansion_disabled, model), measuring)


def _expansion(layers: str = "", **options: Any) -> Callable[[Place], AbstractContextManager[Made]]:
    return partial(_expanded, request=Request(layers, **options))


ADAPT: dict[str, Any] = {"variant": "adapt", "collaborate": "both"}
METHODS: Mapping[str, Method] = {
    "full": Method(_whole, "all parameters of the base are trained", "whole", overwrites=True, copies=5),
    "lora": Method(_adapted, "adapters of PEFT on the linear layers of MLPs", "adapter"),
    "osf": Method(
        partial(_adapted, has_subspaces=True),
        "orthogonal subspace fine-tuning of PEFT, on linear layers",
        "adapter",
        overwrites=True,
        copies=6,
        embedding_copies=2,
    ),
    "preserve": Method(_expansion(), "new blocks in the last quarter of the layers, without W12"),
    "adapt": Method(_expansion(**ADAPT), "new blocks in the last quarter of the layers, with W12"),
    "gated": Method(_expansion("all", **ADAPT | {"variant": "gated"}), "new blocks in all layers, with W12 and gates"),
    "grow": Method(_expansion("all", method="grow"), "a copy of each MLP"),
    "routed": Method(
        partial(_expanded, request=Request("", **ADAPT), is_routed=True), "adapt, routed", rehearses=False
    ),
}


def check_methods(names: Sequence[str]) -> None:
    """Refuse methods of PEFT without PEFT."""
    from importlib.util import find_spec

    needing = [name for name in names if METHODS[name].kind == "adapter"]
    if needing and find_spec("peft") is None:
        raise PlanError(Problem("peft-missing", "--methods", names=needing))
