"""Where transformers puts the tensors of files: it renames modules, and joins tensors.

    on disk      model.layers.3.block_sparse_moe.experts.0.w1.weight      modules are renamed
                 model.layers.3.mlp.experts.0.w1.weight                   tensors are put together
    in memory    model.layers.3.mlp.experts.gate_up_proj

Its own conversions say what it does; files that it can read may have other names than those that it would write.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TensorPlace:
    """Where transformers puts a tensor of a file.

    Attributes:
        name: Name in memory of the tensor that it becomes, or becomes a part of; of several the first.
        part: Pattern of the part that it is; None where it is the whole tensor.
        renamed: Its name once modules are renamed, before anything is put together.
    """

    name: str
    part: str | None
    renamed: str


@dataclass(frozen=True)
class Reading:
    """How transformers reads the files of a model.

    Attributes:
        conversions: Its rules of renaming and converting.
        prefix: The prefix that it adds or removes between models with and without a head.
        tensors: Names of tensors in memory.
    """

    conversions: tuple[Any, ...]
    prefix: str
    tensors: Collection[str]

    def places(self, names: Iterable[str]) -> dict[str, TensorPlace]:
        """Where transformers puts the tensors of these names."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        # some conversions keep state between names
        conversions = deepcopy(self.conversions)
        renamings = [rule for rule in conversions if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in conversions if isinstance(rule, WeightConverter)]
        # transformers asks whether the value under a name is None
        tensors = dict.fromkeys(self.tensors, True)
        places = {}
        for name in sorted(names, key=dot_natural_key):
            renamed, _ = rename_source_key(name, renamings, [])
            key, part = rename_source_key(renamed, [], converters, self.prefix, tensors)
            if key not in tensors and name in tensors:
                key, part, renamed = name, None, name
            places[name] = TensorPlace(key, part, renamed)
        return places


def reading_of(model: Any) -> Reading:
    """How transformers reads the files of a model; on the meta device, too."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    conversions = tuple(get_model_conversion_mapping(model))
    return Reading(conversions, model.base_model_prefix, frozenset(model.state_dict()))
