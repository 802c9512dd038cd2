"""Names of modules in the files of a checkpoint, where transformers renames them while it loads.

The names are those of this checkpoint: transformers may read several for one module, and write yet another.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from transformers import PreTrainedModel

from scale_surgery import modeling
from scale_surgery.checkpoint.expansions import DEFAULT_NAME, tensor_name
from scale_surgery.errors import Problem, UnsupportedFamilyError
from scale_surgery.planning.architecture import Architecture
from scale_surgery.running.stored_names import Reading, TensorPlace

# ignored by transformers in files of any model with rope
OLD_FREQUENCIES = r"rotary_emb\.inv_freq"


@dataclass(frozen=True)
class _Tensor:
    """A tensor of a file: its names on disk and in memory, each as the path of its layer or base model and the rest."""

    disk_path: str
    disk_rest: str
    memory_path: str
    memory_rest: str


def with_stored_names(architecture: Architecture, reading: Reading, places: Mapping[str, TensorPlace]) -> Architecture:
    """Add the names of modules in the files of a checkpoint; see `Architecture.stored_as`."""
    layers = _in_layers(architecture, places)
    names = _Names(reading)
    by_layer = {layer: names.of(architecture.kind(layer).modules, tensors) for layer, tensors in sorted(layers.items())}
    outside = names.of(architecture.modules, list(_around_layers(architecture, places, layers)))
    return replace(_with_kinds(architecture, by_layer), stored_as=_differing(outside))


def _in_layers(architecture: Architecture, places: Mapping[str, TensorPlace]) -> dict[int, list[_Tensor]]:
    """The tensors of each layer."""
    layers, path = defaultdict(list), f"{architecture.layers_path}."
    for name, place in places.items():
        number = place.name.removeprefix(path).partition(".")[0]
        if not (place.name.startswith(path) and number.isdecimal() and int(number) < len(architecture.kind_of_layer)):
            continue
        layer = f"{architecture.layers}.{number}."
        before, mark, inside = name.partition(layer)
        renamed_before, renamed_mark, renamed_inside = place.renamed.partition(layer)
        # some tensors of layers are stored together, elsewhere
        if mark and renamed_mark:
            layers[int(number)].append(_Tensor(before + layer, inside, renamed_before + layer, renamed_inside))
    return dict(layers)


def _around_layers(
    architecture: Architecture, places: Mapping[str, TensorPlace], layers: Mapping[int, list[_Tensor]]
) -> Iterator[_Tensor]:
    """The tensors of the base model that lie in no layer."""
    if not layers:
        return
    number, tensors = next(iter(layers.items()))
    prefix = tensors[0].disk_path.removesuffix(f"{architecture.layers}.{number}.")
    base = f"{architecture.base_model}." if architecture.base_model else ""
    for name, place in places.items():
        if place.name.startswith(base) and name.startswith(prefix):
            is_whole = place.renamed.startswith(base)
            yield _Tensor(prefix, name.removeprefix(prefix), base if is_whole else "", place.renamed.removeprefix(base))


@dataclass
class _Names:
    """Finds names on disk of modules, such that transformers reads new tensors beside them too."""

    reading: Reading
    known: dict[tuple[str, str], bool] = field(default_factory=dict)

    def of(self, modules: Iterable[str], tensors: list[_Tensor]) -> dict[str, str]:
        """Names on disk of modules that hold some of the tensors."""
        stored_names = {}
        for module in modules:
            tensors_inside = [tensor for tensor in tensors if tensor.memory_rest.startswith(f"{module}.")]
            stored = (self._name(module, tensor) for tensor in tensors_inside)
            if tensors_inside:
                stored_names[module] = next((name for name in stored if name is not None), module)
        return stored_names

    def _name(self, module: str, tensor: _Tensor) -> str | None:
        """Name on disk of a module by one of its tensors; None where the tensor alone is renamed."""
        rest = tensor.memory_rest.removeprefix(module)
        stored = tensor.disk_rest.removesuffix(rest)
        if stored == tensor.disk_rest:
            return None
        if self._is_read_back(module, stored, tensor):
            return stored
        if rest == ".weight":
            where, name = f"{tensor.disk_path}{tensor.disk_rest}", f"{tensor.memory_path}{tensor.memory_rest}"
            raise UnsupportedFamilyError(Problem("tensor-renamed-alone", where, name=name))
        return None

    def _is_read_back(self, module: str, stored: str, tensor: _Tensor) -> bool:
        """Return True if transformers reads new tensors of this name on disk into the module."""
        if (module, stored) not in self.known:
            names = {
                tensor_name(tensor.disk_path + stored, DEFAULT_NAME, block): tensor_name(
                    tensor.memory_path + module, DEFAULT_NAME, block
                )
                for block in modeling.block_names()
            }
            places = self.reading.places(names)
            self.known[module, stored] = all(places[name].renamed == renamed for name, renamed in names.items())
        return self.known[module, stored]


def _with_kinds(architecture: Architecture, by_layer: Mapping[int, Mapping[str, str]]) -> Architecture:
    """Write names on disk into the kinds of layers; layers whose names differ become kinds of their own."""
    kinds, numbers = [], list[int]()
    for layer, number in enumerate(architecture.kind_of_layer):
        same = [names for position, names in by_layer.items() if architecture.kind_of_layer[position] == number]
        # a layer that lacks a tensor has its name from the others
        together = {name: stored_name for names in same for name, stored_name in names.items()}
        is_agreed = all(together[name] == stored_name for names in same for name, stored_name in names.items())
        stored = together if is_agreed else by_layer.get(layer, {})
        kind = replace(architecture.kinds[number], stored_as=_differing(stored))
        if kind not in kinds:
            kinds.append(kind)
        numbers.append(kinds.index(kind))
    return replace(architecture, kinds=tuple(kinds), kind_of_layer=tuple(numbers))


def _differing(names: Mapping[str, str]) -> dict[str, str]:
    return {name: stored for name, stored in names.items() if stored != name}


def unread_names(model: PreTrainedModel) -> tuple[str, ...]:
    """Patterns of tensors that transformers ignores in old files, such as masks, and that the model does not have."""
    ignored = {*(model._keys_to_ignore_on_load_unexpected or ()), OLD_FREQUENCIES}
    patterns = sorted(rf"(^|\.)(?:{pattern})$" for pattern in ignored)
    tensor_names = list(model.state_dict())
    return tuple(pattern for pattern in patterns if not any(re.search(pattern, name) for name in tensor_names))
