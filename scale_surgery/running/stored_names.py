"""Where transformers puts the tensors of files, by their names: it renames modules, and makes one tensor of several.

    on disk      model.layers.3.block_sparse_moe.experts.0.w1.weight      modules are renamed
                 model.layers.3.mlp.experts.0.w1.weight                   tensors are put together
    in memory    model.layers.3.mlp.experts.gate_up_proj

What it does is asked of its own conversions; not every file that can be read has the names that it would write.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor of a file comes to stand.

    Attributes:
        name: Name of the tensor in memory that it becomes, or becomes a part of; of several the first.
        part: Which part, by the pattern of its name; None where it becomes that tensor as it is.
        renamed: Its name once modules are renamed, before anything is put together.
    """

    name: str
    part: str | None
    renamed: str


@dataclass(frozen=True)
class Reading:
    """How transformers reads the files of a model.

    Attributes:
        conversions: What it renames and converts, in its own form.
        prefix: What it takes off from names, or puts before them, where whole models and parts of them are exchanged.
        tensors: Names of tensors in memory.
    """

    conversions: tuple[Any, ...]
    prefix: str
    tensors: Collection[str]

    def places(self, names: Iterable[str]) -> dict[str, TensorPlace]:
        """Where tensors come to stand."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        # some conversions remember what they have seen
        conversions = deepcopy(self.conversions)
        renamings = [own for own in conversions if isinstance(own, WeightRenaming)]
        converters = [own for own in conversions if isinstance(own, WeightConverter)]
        # transformers asks whether what is found under a name is None
        tensors = dict.fromkeys(self.tensors, True)
        found = {}
        for name in sorted(names, key=dot_natural_key):
            renamed, _ = rename_source_key(name, renamings, [])
            own, part = rename_source_key(renamed, [], converters, self.prefix, tensors)
            if own not in tensors and name in tensors:
                own, part, renamed = name, None, name
            found[name] = TensorPlace(own, part, renamed)
        return found


def reading_of(model: Any) -> Reading:
    """How transformers reads the files of a model; on the meta device, too."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    conversions = tuple(get_model_conversion_mapping(model))
    return Reading(conversions, model.base_model_prefix, frozenset(model.state_dict()))
