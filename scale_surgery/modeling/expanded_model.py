"""The mixin before a stock model class: it expands the model's modules as its configuration says.

It also freezes the base after loading, says what trains, and switches the expansion off and on.
This file travels with the checkpoint: it opens no file, and needs only torch and transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .expanded_attention import expand_attention, switch_attention
from .expanded_modules import EXPANSION_NAMES, ExpandedModule, expand_module


def expand_layer(layer: nn.Module, specs: dict[str, dict], collaborative_groups: list[str], dtype: str | None) -> None:
    """Expand the modules of one layer as `specs` say: module name to kind and sizes."""
    for name, spec in specs.items():
        sizes = {key: value for key, value in spec.items() if key != "group"}
        if spec["kind"] == "linear":
            sizes["collaborative"] = spec["group"] in collaborative_groups
        if spec["kind"] in ("linear", "norm"):
            sizes["dtype"] = dtype
        expand_module(layer.get_submodule(name), **sizes)


def expand_layers(base_model: nn.Module, plan: dict[str, Any]) -> None:
    """Expand the chosen layers, and let the up stream pass through the others."""
    collaborative = plan["collaborative"]
    for index, layer in enumerate(base_model.get_submodule(plan["layers"])):
        if index not in plan["expanded_layers"]:
            expand_layer(layer, plan["passing"], [], None)
            continue
        groups = collaborative["groups"] if index in collaborative["layers"] else []
        expand_layer(layer, plan["expanded"], groups, plan["dtype"])
        for name, spec in plan["attention"].items():
            expand_attention(layer.get_submodule(name), **spec)


def detach_base(model: nn.Module, base_model: nn.Module, plan: dict[str, Any]) -> None:
    """Let no gradient pass through the base stream where nothing that trains reaches it.

    That is below the first collaborative layer; without one it is the whole model, final norm and head included.
    """
    collaborative = plan["collaborative"]["layers"]
    layers = base_model.get_submodule(plan["layers"])
    parts = layers[: min(collaborative)] if collaborative else [model]
    for module in (module for part in parts for module in part.modules()):
        if hasattr(module, "base_detached"):
            module.base_detached = True


class ExpandedPreTrainedModel:
    """Mixin before a stock model class: expands its modules as `config.scale_surgery` says, and freezes the base."""

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        plan = config.scale_surgery
        base_model = getattr(self, plan["base_model"], self)
        for name, spec in plan["model"].items():
            own_dtype = {} if spec["kind"] == "passing" else {"dtype": plan["dtype"]}
            expand_module(base_model.get_submodule(name), **spec, **own_dtype)
        head = self.get_output_embeddings()
        if head is not None and plan["head"]:
            expand_module(head, **plan["head"], dtype=plan["dtype"])
        elif head is not None:
            # the last token's features are strided, and torch takes another kernel for them when a weight is frozen
            expand_module(head, "passing", base=head.weight.shape[1], up=0)
        expand_layers(base_model, plan)
        detach_base(self, base_model, plan)
        if plan["dtype"] == "float32":
            # new tensors that were asked for in float32 stay so when the base is loaded in half precision
            self._keep_in_fp32_modules_strict = set(self.expansion_names())
        self.post_init()
        self.freeze_base()

    # names on disk to names of modules, as patterns, where this transformers release renamed a module
    renamed_modules: dict[str, str] = {}

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """Load as transformers does, then freeze the base: loading itself resets `requires_grad`.

        `expansion_enabled=False` gives the base model: see `enable_expansion`.
        """
        if cls.renamed_modules:
            kwargs.setdefault("key_mapping", cls.renamed_modules)
        is_enabled = kwargs.pop("expansion_enabled", True)
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.freeze_base()
        model.enable_expansion(is_enabled)
        return loaded

    def freeze_base(self) -> None:
        """Let the expansion tensors train, and nothing else."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.rsplit(".", 1)[-1] in EXPANSION_NAMES)

    def _set_gradient_checkpointing(self, enable=True, **kwargs):
        """As transformers; some of its releases let no gradient into a layer whose input requires none.

        Reentrant checkpointing is like that, and below the first expanded layer nothing requires a gradient.
        """
        super()._set_gradient_checkpointing(enable=enable, **kwargs)
        if enable:
            self.enable_input_require_grads()

    def enable_expansion(self, is_enabled: bool = True) -> None:
        """Switch the expansion on, or off for good: then the stock modules run alone, and the model is its base.

        A KV cache belongs to the state in which it was filled.
        """
        for module in self.modules():
            if isinstance(module, ExpandedModule):
                module.is_enabled = is_enabled
            elif hasattr(module, "expanded_values"):
                switch_attention(module, is_enabled=is_enabled)

    @property
    def is_expansion_enabled(self) -> bool:
        """Whether the expansion takes part in a forward."""
        return all(module.is_enabled for module in self.modules() if isinstance(module, ExpandedModule))

    @contextmanager
    def expansion_disabled(self) -> Iterator[None]:
        """Run the base model alone inside a `with` block."""
        was_enabled = self.is_expansion_enabled
        self.enable_expansion(False)
        try:
            yield
        finally:
            self.enable_expansion(was_enabled)

    def trainable_parameters(self) -> dict[str, dict[str, int]]:
        """Count what trains: for each layer, and for what lies outside the layers, parameters by group."""
        layers = self.config.scale_surgery["layers"] + "."
        counts: dict[str, dict[str, int]] = {}
        for path, module in self.named_modules():
            for name, parameter in getattr(module, "expansion_parameters", dict)().items():
                _, _, inside = path.partition(layers)
                place = f"layer {inside.split('.')[0]}" if inside else "outside"
                group = module.groups[name]
                row = counts.setdefault(place, {})
                row[group] = row.get(group, 0) + parameter.numel() * parameter.requires_grad
        return counts

    def print_trainable_parameters(self) -> None:
        """Print what trains as a table: a row a layer, a column a group."""
        counts = self.trainable_parameters()
        groups = sorted({group for row in counts.values() for group in row})
        print(f"{'':<10}" + "".join(f"{group:>12}" for group in groups))
        for place, row in counts.items():
            print(f"{place:<10}" + "".join(f"{row.get(group, 0):>12,}" for group in groups))
        total = sum(parameter.numel() for parameter in self.parameters())
        trained = sum(sum(row.values()) for row in counts.values())
        print(f"trains {trained:,} of {total:,} parameters ({trained / total:.2%})")

    def expansion_names(self) -> set[str]:
        """Last parts of the names of this model's expansion tensors."""
        last_parts = {name.rsplit(".", 1)[-1] for name, _ in self.named_parameters()}
        return last_parts.intersection(EXPANSION_NAMES)

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
            for module in self.modules()
            if isinstance(module, ExpandedModule) and not getattr(module, "_is_hf_initialized", False)
            for parameter in module.expansion_parameters().values()
            if not getattr(parameter, "_is_hf_initialized", False)
        ]
        super().initialize_weights()
        for parameter in missing:
            parameter.zero_()
