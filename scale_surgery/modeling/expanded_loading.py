"""Loading, initialising, saving, freezing and counting of an expanded model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .expanded_modules import Blocks
from .expanded_stock import StrictlyLoaded


class LoadedModel(StrictlyLoaded):
    """Mixin before a stock model class: loads as transformers does, refuses what does not fit, and freezes the base."""

    # set where the model was put around one that was quantised
    is_base_quantised = False

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """Load as `StrictlyLoaded` does, and choose what runs.

        `expansion_enabled=False` gives the base model, `routing_enabled=False` the only expansion alone: see
        `set_expansion`.
        """
        is_enabled, is_routed = kwargs.pop("expansion_enabled", True), kwargs.pop("routing_enabled", True)
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.align()
        if not is_enabled:
            model.enable_expansion(False)
        elif not is_routed:
            model.enable_routing(False)
        return loaded

    def expansion_blocks(self) -> list[Blocks]:
        """The blocks of all expansions."""
        return [module for module in self.modules() if isinstance(module, Blocks)]

    def freeze_base(self) -> None:
        """Let the tensors of the expansions train, and nothing else."""
        super().freeze_base()
        for blocks in self.expansion_blocks():
            for parameter in blocks.parameters():
                parameter.requires_grad_(True)

    def align(self) -> None:
        """Align blocks in memory as the base's weights are."""
        for blocks in self.expansion_blocks():
            blocks.align()

    def expansion_parameters(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """The tensors of all expansions, frozen ones too: name, group, and the tensor itself."""
        for path, blocks in self.named_modules():
            if isinstance(blocks, Blocks):
                for name, parameter in blocks.named_parameters():
                    yield f"{path}.{name}", blocks.group_of[name], parameter

    def trainable_parameters(self) -> dict[str, dict[str, int]]:
        """Count what trains: for each expansion, parameters by group."""
        counts: dict[str, dict[str, int]] = {name: {} for name in self.expansions}
        for name, group, parameter in self.expansion_parameters():
            row = counts[name.rpartition(".expansions.")[2].partition(".")[0]]
            row[group] = row.get(group, 0) + parameter.numel() * parameter.requires_grad
        return counts

    def print_trainable_parameters(self) -> None:
        """Print what trains as a table: a row an expansion, a column a group."""
        counts = self.trainable_parameters()
        groups = sorted({group for row in counts.values() for group in row})
        width = max([10, *(len(name) + 1 for name in counts)])
        print(" " * width + "".join(f"{group:>12}" for group in groups))
        for name, row in counts.items():
            print(f"{name:<{width}}" + "".join(f"{row.get(group, 0):>12,}" for group in groups))
        total = sum(parameter.numel() for parameter in self.parameters())
        trained = sum(sum(row.values()) for row in counts.values())
        print(f"trains {trained:,} of {total:,} parameters ({trained / total:.2%})")

    def save_pretrained(self, *args, **options):
        """As transformers; on a quantised base the tensors of expansions alone: the base's are not its files'."""
        if self.is_base_quantised:
            tensors = options.get("state_dict") or self.state_dict()
            options["state_dict"] = {name: tensor for name, tensor in tensors.items() if ".expansions." in name}
        super().save_pretrained(*args, **options)

    def resize_token_embeddings(self, *args, **kwargs):
        """Refuse: embedding and head have an up part that stock code does not resize."""
        raise NotImplementedError("Resize the base model's embeddings first, then expand it.")

    @torch.no_grad()
    def initialize_weights(self):
        """Initialise as the stock model does; expansion tensors that no file gave are zero.

        transformers lets the stock base model initialise its own modules, and it knows no expansion tensors.
        """
        missing = [
            parameter
            for blocks in self.expansion_blocks()
            if not getattr(blocks, "_is_hf_initialized", False)
            for parameter in blocks.parameters()
            if not getattr(parameter, "_is_hf_initialized", False)
        ]
        super().initialize_weights()
        for parameter in missing:
            parameter.zero_()


def refusing(name: str) -> Any:
    """A method in place of one of transformers' adapters, which know nothing of expansions."""

    def refuse(self: Any, *args: Any, **options: Any) -> None:
        """Refuse: adapters of transformers know nothing of expansions."""
        raise NotImplementedError(
            f"{name}: is of transformers' adapters, and this model has expansions. Use load_expansion(model, EXTRACT, "
            "name=...) of scale_surgery, model.set_expansion, model.use_expansion, model.expansions or "
            "model.delete_expansion."
        )

    refuse.__name__ = name
    return refuse
