"""A model without weights, made of its config: what its tensors are called in memory, which are one, what is merged.

Names in files are not always those of the model: transformers renames modules while it loads, and makes one tensor of
the experts of a layer. Who saves a model without its help writes the names in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from scale_surgery import modeling
from scale_surgery.running.loading import auto_class_of, quiet_transformers, translated

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Skeleton:
    """A model without weights.

    Attributes:
        model: The model, on the device meta.
        base_model: Path of the module that holds its layers; files may lack the first parts of it, or all.
    """

    model: Any
    base_model: str

    @cached_property
    def own(self) -> Mapping[str, str]:
        """Names of its tensors, each to the first name of the same one: tied tensors are one."""
        found: dict[int, str] = {}
        return {name: found.setdefault(id(own), name) for name, own in self.model.state_dict(keep_vars=True).items()}

    def names(self, stored: Iterable[str]) -> dict[str, str]:
        """Names in memory by names in files; a name that the model does not have stays as transformers renames it."""
        parts = self.base_model.split(".")
        prefixes = [".".join(parts[:count]) + "." for count in range(1, len(parts) + 1)]
        renamed = modeling.names_in_memory(self.model, stored)
        forms = {
            name: [own, *(prefix + own for prefix in prefixes), *map(own.removeprefix, prefixes)]
            for name, own in renamed.items()
        }
        return {name: next((own for own in some if own in self.own), some[0]) for name, some in forms.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, by its name in memory."""
        return tuple(self.model.state_dict(keep_vars=True)[name].shape)

    def split(self, name: str, tensor: Tensor | None = None) -> dict[str, Tensor]:
        """What transformers merged into a tensor, by names in files: the experts of a layer, or the tensor alone.

        Args:
            name: Its name in memory.
            tensor: The tensor; by default one without values, which tells names and shapes.
        """
        from transformers.core_model_loading import revert_weight_conversion

        given = self.model.state_dict()[name] if tensor is None else tensor
        return dict(revert_weight_conversion(self.model, {name: given}))


def make_skeleton(config: Any, name: str, base_model: str) -> Skeleton:
    """Make a model without weights.

    Args:
        config: What transformers made of a config.json.
        name: What the model is called.
        base_model: Path of the module that holds its layers.

    Returns:
        The model; its tied tensors are tied.

    Raises:
        CheckpointError: If transformers makes no model of the config.
    """
    import torch

    modeling.register()
    advice = "Check config.json, and whether transformers alone loads the model."
    with translated(name, "transformers makes no model of its config.json", advice), quiet_transformers():
        with torch.device("meta"):
            model = auto_class_of({"model_type": config.model_type}).from_config(config)
        model.tie_weights()
    return Skeleton(model, base_model)
