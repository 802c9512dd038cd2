"""A model in memory as a checkpoint: tensors by their names on disk, split if loading joins them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

from scale_surgery import modeling
from scale_surgery.running.loading import auto_class_of, quiet_transformers, translated
from scale_surgery.running.stored_names import TensorPlace, reading_of

if TYPE_CHECKING:
    from torch import Tensor


class InMemory:
    """A view of a loaded model as the checkpoint of its files. It holds no references to tensors.

    Attributes:
        model: The model.
        reading: The rules by which transformers reads its files.
        places: Places in memory of the checkpoint's tensors, by their names on disk. Tensors without a place are
            omitted, such as the head in a model without one.
    """

    def __init__(self, model: Any, names: Iterable[str]) -> None:
        """Find the places in memory of the tensors of a checkpoint."""
        self.model, self.reading = model, reading_of(model)
        places = self.reading.places(names)
        self.places: Mapping[str, TensorPlace] = {
            name: place for name, place in places.items() if place.name in self.reading.tensors
        }

    @cached_property
    def tied(self) -> Mapping[str, str]:
        """Names in memory, each mapped to the first name of the same tensor."""
        first: dict[int, str] = {}
        tensors = self.model.state_dict(keep_vars=True)
        return {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}

    @property
    def unfed(self) -> dict[str, Tensor]:
        """Parameters that get no tensor from the checkpoint, by their names in memory."""
        tensors = self.model.state_dict(keep_vars=True)
        fed = {id(tensors[name]) for place in self.places.values() for name in self.targets(place)}
        return {name: parameter for name, parameter in self.model.named_parameters() if id(parameter) not in fed}

    def tensors(
        self, get: Callable[[str], Tensor] | None = None, only: Collection[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors in their stored form, by name on disk. Joined tensors are split one at a time."""
        get = get or self.model.state_dict().__getitem__
        chosen = self.places if only is None else {name: self.places[name] for name in only if name in self.places}
        for name, place in chosen.items():
            if place.part is None:
                yield name, get(place.name)
        joined = {place.name for place in chosen.values() if place.part is not None}
        parts = sorted((place.name, name) for name, place in self.places.items() if place.name in joined)
        for _, names in groupby(parts, key=lambda pair: pair[0]):
            split = self._split([name for _, name in names], get)
            yield from ((name, tensor) for name, tensor in split if name in chosen)

    def headers(self, only: Collection[str] | None = None) -> dict[str, Tensor]:
        """Return the tensors of `tensors` on the meta device, without values."""
        import torch

        state = self.model.state_dict()
        return dict(self.tensors(lambda name: torch.empty_like(state[name], device="meta"), only))

    def held_by(self, joined: Collection[str]) -> list[str]:
        """Return the names on disk of the tensors that loading joins into these tensors in memory only."""
        parts = [name for name, place in self.places.items() if place.part is not None]
        return [name for name in parts if all(target in joined for target in self.targets(self.places[name]))]

    def targets(self, place: TensorPlace) -> list[str]:
        """Return the names in memory of the targets of a checkpoint tensor."""
        if place.part is None:
            return [place.name]
        conversion = next(known for known in self.reading.conversions if place.part in known.source_patterns)
        first, *more = conversion.target_patterns
        names = [place.name, *(place.name.replace(first, target) for target in more)]
        return [name for name in names if name in self.reading.tensors]

    def _split(self, names: list[str], get: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Split joined tensors in the way in which transformers saves them."""
        from transformers.core_model_loading import dot_natural_key, revert_weight_conversion

        whole = {name: get(name) for name in self.targets(self.places[names[0]])}
        # it may save them under other names; tensors of one part are matched in order
        saved = revert_weight_conversion(self.model, whole)
        places = self.reading.places(saved)
        for part in dict.fromkeys(self.places[name].part for name in names):
            on_disk = sorted((name for name in names if self.places[name].part == part), key=dot_natural_key)
            as_saved = sorted((name for name in saved if places[name].part == part), key=dot_natural_key)
            # if the number differs from that in the checkpoint, none is returned
            if len(on_disk) == len(as_saved):
                yield from ((name, saved[key]) for name, key in zip(on_disk, as_saved, strict=True))


def without_weights(config: Any, name: str) -> Any:
    """Create a model on the meta device, with tied weights."""
    import torch

    modeling.register()
    with translated("config-not-read", f"{name}: config.json"), quiet_transformers():
        with torch.device("meta"):
            model = auto_class_of({"model_type": config.model_type}).from_config(config)
        model.tie_weights()
    return model


def kept_in_float32(model: Any) -> set[str]:
    """Return the names in memory of tensors that a model's class always keeps in float32."""
    import torch

    with torch.device("meta"):
        made = type(model)._from_config(deepcopy(model.config), dtype=model.dtype).state_dict()
    patterns = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    always = [re.compile(pattern.replace("*", ".*")) for pattern in patterns]
    return {
        name
        for name, tensor in made.items()
        if tensor.dtype == torch.float32 or any(pattern.search(name) for pattern in always)
    }
