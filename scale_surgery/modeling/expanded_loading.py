"""Loading, initialising, saving, freezing and counting of an expanded model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .expanded_modules import Blocks

# tensors that an error names
MOST_NAMED = 5
# what transformers says of a folder or repository without weights, and what such a one may be: this code opens no file
NO_WEIGHTS = "file named"
AN_EXTRACT = (
    "A folder with extract.json in place of weights is an extract: an expansion without its base, which extract.json "
    "names. Put it on that base: scale-surgery apply EXTRACT --base BASE -o FOLDER writes a model that loads so; or "
    "scale_surgery.load_expansion(BASE, EXTRACT) makes one in memory."
)
# what transformers' own adapters are called by
ADAPTER_METHODS = (
    *("load_adapter", "add_adapter", "set_adapter", "delete_adapter", "enable_adapters", "disable_adapters"),
    *("active_adapter", "active_adapters", "get_adapter_state_dict"),
)


class LoadedModel:
    """Mixin before a stock model class: loads as transformers does, refuses what does not fit, and freezes the base."""

    # set where the model was put around one that was quantised
    is_base_quantised = False

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """Load as transformers does, refuse what does not fit, then freeze the base: loading resets `requires_grad`.

        `expansion_enabled=False` gives the base model, `routing_enabled=False` the only expansion alone: see
        `set_expansion`. `strict_loading=False` takes what is missing as it was initialised, as transformers does;
        `output_loading_info=True` then says what that is.
        """
        is_enabled, is_routed = kwargs.pop("expansion_enabled", True), kwargs.pop("routing_enabled", True)
        is_strict, says_more = kwargs.pop("strict_loading", True), kwargs.pop("output_loading_info", False)
        try:
            model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        except OSError as error:
            if NO_WEIGHTS not in str(error):
                raise
            raise OSError(f"{error}\n{AN_EXTRACT}") from error
        if is_strict:
            model.check_loaded(info)
        model.freeze_base()
        model.align()
        if not is_enabled:
            model.enable_expansion(False)
        elif not is_routed:
            model.enable_routing(False)
        return (model, info) if says_more else model

    def check_loaded(self, info: dict[str, Any]) -> None:
        """Refuse files whose tensors are not the model's; transformers warns, and initialises what is missing.

        Tied tensors, and what the stock class leaves out itself, are not in `info`. A model without a head needs none.

        Args:
            info: What transformers says of loading.

        Raises:
            ValueError: If a tensor is missing, unexpected or of another shape.
        """
        unexpected = set(info["unexpected_keys"])
        if self.get_output_embeddings() is None and is_head(unexpected):
            unexpected = set()
        problems = [f"{name} is missing" for name in sorted(info["missing_keys"])]
        problems += [f"{name} is unexpected" for name in sorted(unexpected)]
        problems += [f"{name[0]} is of another shape" for name in sorted(info["mismatched_keys"])]
        if problems:
            more = f" and {len(problems) - MOST_NAMED} more" if len(problems) > MOST_NAMED else ""
            raise ValueError(
                f"{type(self).__name__}: the files do not hold its tensors: {', '.join(problems[:MOST_NAMED])}{more}. "
                "Nothing may be initialised anew. Restore the files from where you got them, or load them with the "
                "release of transformers that wrote them; strict_loading=False loads what there is."
            )

    def expansion_blocks(self) -> list[Blocks]:
        """The blocks of all expansions."""
        return [module for module in self.modules() if isinstance(module, Blocks)]

    def freeze_base(self) -> None:
        """Let the tensors of the expansions train, and nothing else; in the fused form nothing trains."""
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        for blocks in self.expansion_blocks():
            for parameter in blocks.parameters():
                parameter.requires_grad_(not self.is_fused)

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

    @classmethod
    def is_custom_code(cls) -> bool:
        """What initialises is stock code, which looks at each tensor whether a file gave it; code of others may not.

        transformers would not let it compute the buffers of modules whose own tensors all came from files.
        """
        return False

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Whether experts run by kernels that can be chosen, as the stock model's do; transformers 5 alone asks.

        It looks for a word in the source of a class's module, and ours is another: experts would be added up in another
        order than the base's, unless a stock model was made before.
        """
        stock: Any = next(parent for parent in cls.__mro__ if not issubclass(parent, LoadedModel))
        return stock._can_set_experts_implementation()

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


def is_head(names: set[str]) -> bool:
    """Whether tensors that a model without a head has no place for are those of one head."""
    modules = {
        name.partition(".expansions.")[0] if ".expansions." in name else name.rpartition(".")[0] for name in names
    }
    return len(modules) == 1 and ("." not in modules.pop() or any(".expansions." in name for name in names))


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
