"""The methods that benchmarks/streams compares: what trains for each task, and what it becomes part of.

Each way of going on has a `pupil`, the model that learns the next task, and `takes_up` it when it has. `answering` are
the models that answer then, by the name of what was done to make them one.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.biography.methods import BOTH_0, PRESERVE, RANK, adapted, whole
from benchmarks.protections import (
    between,
    knowledge_preserved,
    on_mlps,
    pulled,
    shielded,
    with_subspaces,
    without_intruders,
)
from benchmarks.streams.learning import make_rehearsal
from scale_surgery import expand, extract, load_expansion
from scale_surgery.biographies import SHIPPED_MODEL

MakePupil = partial[Any]
# of each update, the share that TIES keeps; as in the paper (arXiv 2306.01708)
KEPT = 0.2


class Continued:
    """One model that learns one task after another."""

    def __init__(self, make: MakePupil, seed: int) -> None:
        self.model = make(SHIPPED_MODEL, seed)

    def pupil(self, number: int) -> Any:
        """The model that learns the task of a number."""
        return self.model

    def take_up(self, number: int, pupil: Any) -> None:
        """Go on with it."""

    def answering(self) -> Iterator[tuple[str, Any]]:
        """What answers after a task."""
        yield "", self.model


class HalfWay(Continued):
    """One model that learns on and on; what answers has its weights half of the way from the base to them."""

    def __init__(self, make: MakePupil, seed: int) -> None:
        super().__init__(make, seed)
        self.make = make

    def answering(self) -> Iterator[tuple[str, Any]]:
        """The weights between."""
        yield "", between(0.5, self.make, SHIPPED_MODEL, self.model)


class WithoutIntruders(Continued):
    """One adapter that learns on and on; what answers has its intruder dimensions reduced."""

    def answering(self) -> Iterator[tuple[str, Any]]:
        """The model with the adapter reduced."""
        yield "", without_intruders(SHIPPED_MODEL, self.model)


class Renewed(Continued):
    """One model whose directions are sorted anew, into those that stay and those that learn, before each task."""

    def __init__(self, make: MakePupil, seed: int) -> None:
        self.model, self.seed = AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL), seed
        self.make = make

    def pupil(self, number: int) -> Any:
        """The model, prepared for a task."""
        return self.make(self.model, self.seed + number)

    def take_up(self, number: int, pupil: Any) -> None:
        """Go on with what it has become."""
        self.model = pupil.merge_and_unload()


class Composed:
    """An expansion of the base for each task, all of them mixed.

    Attributes:
        model: The base with the expansions that have learned; their names are those that `name_of` gives.
    """

    def __init__(self, make: MakePupil, seed: int) -> None:
        self.request, self.seed = make.keywords["request"], seed
        self.model = AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL)

    def pupil(self, number: int) -> Any:
        """A new expansion of the base, on the same weights."""
        with tempfile.TemporaryDirectory() as folder:
            request = replace(self.request, seed=self.seed + number)
            wide = expand(SHIPPED_MODEL, request, Path(folder) / "wide").path
            extract_path = extract(wide, Path(folder) / "extract").path
            self.model = load_expansion(self.model, extract_path, name=name_of(number))
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(f".expansions.{name_of(number)}." in name)
        self.model.set_expansion(name_of(number))
        return self.model

    def take_up(self, number: int, pupil: Any) -> None:
        """Mix it with the others."""
        self.model.set_expansion(self.model.expansions)

    def answering(self) -> Iterator[tuple[str, Any]]:
        """All paths, mixed."""
        yield "", self.model


class Merged:
    """An adapter for each task, trained from the base; what answers has all of them merged into one."""

    def __init__(self, make: MakePupil, seed: int) -> None:
        self.model = make(SHIPPED_MODEL, seed)
        self.learned: list[str] = []

    def pupil(self, number: int) -> Any:
        """The base with a new adapter."""
        name = name_of(number)
        with warnings.catch_warnings():
            # that this adapter is not the only one
            warnings.filterwarnings("ignore", module="peft")
            self.model.add_adapter(name, self.model.peft_config["default"])
        self.model.set_adapter(name)
        return self.model

    def take_up(self, number: int, pupil: Any) -> None:
        """Keep the adapter."""
        self.learned.append(name_of(number))

    def answering(self) -> Iterator[tuple[str, Any]]:
        """The base with the mean of all updates, and with what TIES makes of them; no rank is cut."""
        from peft.utils.merge_utils import ties

        yield "averaged", self._merged(lambda updates: torch.stack(updates).mean(0))
        yield "TIES", self._merged(lambda updates: ties(updates, torch.ones(len(updates)), KEPT))

    def _merged(self, merge: Callable[[list[Tensor]], Tensor]) -> Any:
        merged = AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL)
        for name, module in self.model.get_base_model().named_modules():
            if hasattr(module, "get_delta_weight"):
                with torch.no_grad():
                    updates = [module.get_delta_weight(adapter) for adapter in self.learned]
                    merged.get_submodule(name).weight += merge(updates)
        return merged


def name_of(number: int) -> str:
    """What is learned with the task of a number, by name."""
    return f"task_{number + 1}"


@dataclass(frozen=True)
class Method:
    """One way to learn tasks in a row.

    Attributes:
        name: What it is called in records.
        start: Begins at the base with a seed.
        rate: Learning rate.
        shown: Names of what answers, in tables and figures, by what `answering` calls them.
    """

    name: str
    start: Callable[[int], Any]
    rate: float
    shown: dict[str, str]


def _method(name: str, way: type, make: MakePupil, rate: float, shown: dict[str, str] | None = None) -> Method:
    return Method(name, partial(way, make), rate, shown or {"": name})


def own_rows(model: Any) -> Tensor:
    """Text that the base writes, (rows, tokens)."""
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    return make_rehearsal(model, tokenizer, SAMPLES, seed=0).rows


LORA = partial(adapted, start=True, rank=RANK)
# trains as many parameters
RANK_OF_MLPS = 64
# that say what matters to the base
SAMPLES = 200
METHODS = (
    _method("composed preserve", Composed, PRESERVE.make, 1e-2),
    _method("composed adapt", Composed, BOTH_0.make, 3e-3),
    _method("one preserve", Continued, PRESERVE.make, 1e-2),
    _method("full", Continued, whole, 1e-3, {"": "full fine-tuning"}),
    _method("full, lower rate", Continued, whole, 3e-4, {"": "full fine-tuning, 3e-4"}),
    _method("LoRA", Continued, LORA, 3e-3),
    _method("full, half way", HalfWay, whole, 3e-4, {"": "full fine-tuning, half way"}),
    _method("full L2", Continued, partial(pulled, weight=0.01), 1e-3, {"": "full fine-tuning, L2 0.01"}),
    _method("SSU", Continued, partial(shielded, samples=own_rows), 1e-3),
    _method("OSF", Renewed, partial(with_subspaces), 1e-3),
    _method("LoRA MLP", Continued, partial(on_mlps, rank=RANK_OF_MLPS), 3e-3, {"": "LoRA on MLPs"}),
    _method("LoRA reduced", WithoutIntruders, LORA, 3e-3, {"": "LoRA, intruders reduced"}),
    _method("CorDA", Continued, partial(knowledge_preserved, rank=RANK, samples=own_rows), 1e-3),
    _method("LoRA merged", Merged, LORA, 3e-3, {"averaged": "LoRA, averaged", "TIES": "LoRA, TIES"}),
)
