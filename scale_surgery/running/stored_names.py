"""Places of stored tensors in memory: transformers renames modules, and joins tensors.

    on disk      model.layers.3.block_sparse_moe.experts.0.w1.weight      modules are renamed
                 model.layers.3.mlp.experts.0.w1.weight                   tensors are joined
    in memory    model.layers.3.mlp.experts.gate_up_proj

The conversions of transformers define this. transformers also reads files with other names than it would write.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TensorPlace:
    """The place in memory of a stored tensor.

    Attributes:
        name: Name in memory of the tensor that it becomes, fully or in part; the first if there are several.
        part: Pattern of its part in a joined tensor, or None if it is a whole tensor.
        renamed: Its name after modules are renamed, before tensors are joined.
    """

    name: str
    part: str | None
    renamed: str


@dataclass(frozen=True)
class Reading:
    """The rules by which transformers reads the files of a model.

    Attributes:
        conversions: Rules for renaming and converting.
        prefix: Prefix that transformers adds or removes between models with and without a head.
        tensors: Names of tensors in memory.
    """

    conversions: tuple[Any, ...]
    prefix: str
    tensors: Collection[str]

    def places(self, names: Iterable[str]) -> dict[str, TensorPlace]:
        """Return the places in memory of stored tensors, by their names on disk."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        # some conversions keep state between calls
        conversions = deepcopy(self.conversions)
        renamings = [rule for rule in conversions if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in conversions if isinstance(rule, WeightConverter)]
        # transformers checks if the value of a name is None
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
    """Return the rules by which transformers reads the files of a model, which may be on the meta device."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    conversions = tuple(get_model_conversion_mapping(model))
    return Reading(conversions, model.base_model_prefix, frozenset(model.state_dict()))
