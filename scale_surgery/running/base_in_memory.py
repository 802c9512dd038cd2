"""The tensors of a base in memory as they are stored: by their names on disk, and apart where loading joins them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from itertools import groupby
from typing import TYPE_CHECKING, Any

from scale_surgery.running.stored_names import Place, Reading, reading_of

if TYPE_CHECKING:
    from torch import Tensor


class BaseInMemory:
    """A loaded stock model, seen as the checkpoint that it was loaded from.

    Attributes:
        model: The model.
        places: Where it has the tensors of that checkpoint, by their names on disk; what it has no place for, as a
            model without a head has none for the head, is left out.
    """

    def __init__(self, model: Any, names: Iterable[str]) -> None:
        """See where a model has what a checkpoint holds.

        Args:
            model: The model.
            names: Names of the checkpoint's tensors.
        """
        self.model = model
        self._reading: Reading = reading_of(model)
        self._tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
        found = self._reading.places(names)
        self.places: Mapping[str, Place] = {name: own for name, own in found.items() if own.name in self._tensors}

    @property
    def unfed(self) -> dict[str, Tensor]:
        """Parameters that no tensor of the checkpoint gives, by their names in memory."""
        fed = {id(self._tensors[name]) for place in self.places.values() for name in self._targets(place)}
        return {name: own for name, own in self.model.named_parameters() if id(own) not in fed}

    def tensors(self, *, only_headers: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Each tensor as it is stored, by its name on disk; those that are joined in memory one after the other.

        Args:
            only_headers: Whether shapes and dtypes are enough: then nothing is copied.
        """
        joined = sorted((place.name, name) for name, place in self.places.items() if place.part is not None)
        for name, place in self.places.items():
            if place.part is None:
                yield name, self._tensor(place.name, only_headers=only_headers)
        for _, names in groupby(joined, key=lambda pair: pair[0]):
            yield from self._apart([name for _, name in names], only_headers=only_headers)

    def _tensor(self, name: str, *, only_headers: bool) -> Tensor:
        import torch

        own = self._tensors[name].detach()
        return torch.empty_like(own, device="meta") if only_headers else own

    def _targets(self, place: Place) -> list[str]:
        """Names of the tensors in memory that a tensor of the checkpoint goes into."""
        if place.part is None:
            return [place.name]
        first, *others = next(
            own for own in self._reading.conversions if place.part in own.source_patterns
        ).target_patterns
        names = [place.name, *(place.name.replace(first, other) for other in others)]
        return [name for name in names if name in self._tensors]

    def _apart(self, names: list[str], *, only_headers: bool) -> Iterator[tuple[str, Tensor]]:
        """Take apart what loading joined of some tensors, as transformers does when it saves.

        It may save them under other names; those of one part are read in their order. Where it makes more or fewer of
        them, none is what the checkpoint holds.
        """
        from transformers.core_model_loading import dot_natural_key, revert_weight_conversion

        targets = self._targets(self.places[names[0]])
        whole = {name: self._tensor(name, only_headers=only_headers) for name in targets}
        saved = revert_weight_conversion(self.model, whole)
        places = self._reading.places(saved)
        for part in dict.fromkeys(self.places[name].part for name in names):
            own = sorted((name for name in names if self.places[name].part == part), key=dot_natural_key)
            theirs = sorted((name for name in saved if places[name].part == part), key=dot_natural_key)
            if len(own) == len(theirs):
                yield from ((name, saved[other]) for name, other in zip(own, theirs, strict=True))


def kept_in_float32(model: Any) -> set[str]:
    """Names in memory of tensors that a model's class keeps in float32, whatever the dtype of the others."""
    import torch

    with torch.device("meta"):
        made = type(model)._from_config(deepcopy(model.config), dtype=model.dtype).state_dict()
    patterns = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    asked = [re.compile(pattern.replace("*", ".*")) for pattern in patterns]
    return {
        name
        for name, own in made.items()
        if own.dtype == torch.float32 or any(pattern.search(name) for pattern in asked)
    }
