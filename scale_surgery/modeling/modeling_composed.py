"""Composed models: a stock class with all expansions that its configuration names, mixed by a router over their paths.

`ComposedQwen3ForCausalLM` is made of `Qwen3ForCausalLM` when its name is asked for. The files hold the new tensors of
each expansion, and the base's weights once. This file travels with the checkpoint: it opens no file.
"""

from __future__ import annotations

import re
from copy import deepcopy
from functools import cache
from typing import Any

import transformers
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel

from .configuration_scale import config_of, stock_class

# transformers 4 copies the files that this one imports itself, and no others
from .expanded_arranged import Stage  # noqa: F401
from .expanded_attention import SPLIT_ATTENTION  # noqa: F401
from .expanded_causal_lm import ExpandedForCausalLM
from .expanded_choice import Choice  # noqa: F401
from .expanded_composed import ComposedModel, composed_class
from .expanded_fused import FusedLinear  # noqa: F401
from .expanded_left_out import LeftOut  # noqa: F401
from .expanded_mixture import Mixture  # noqa: F401
from .expanded_model import ExpandedPreTrainedModel, zero_missing
from .expanded_modules import EXPANSION_NAMES
from .expanded_posterior import PathMixture  # noqa: F401
from .expanded_routing import RouterState  # noqa: F401
from .expanded_side_by_side import ComposedBlock  # noqa: F401
from .expanded_streams import Streams  # noqa: F401
from .modeling_scale import convert_as, model_of

COMPOSED = "composed_"
# words of transformers for several devices
SPREADING = ("auto", "balanced", "balanced_low_0", "sequential")


def _spreads(places: Any) -> bool:
    """Whether a device_map names several places, or some that are no device."""
    found = set(map(str, places.values())) if isinstance(places, dict) else {str(places)}
    return len(found) > 1 or "disk" in found


class ComposedPreTrainedModel(ComposedModel):
    """Mixin before a stock language model: takes up the expansions that `config.scale_surgery` names, and mixes all."""

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        said = config.scale_surgery
        self.become_composed(said["paths"])
        for name, plan in said["expansions"].items():
            self.expanded_models[name], self.problems[name] = self._expand(plan), []
            if plan["dtype"] == "float32":
                kept = self._keep_in_fp32_modules_strict or ()
                self._keep_in_fp32_modules_strict = {*kept, f"expanded_models.{name}"}
        self.post_init()
        if not any(own.is_meta for own in self.parameters()):
            self.begin()

    def _expand(self, plan: dict[str, Any]) -> ExpandedForCausalLM:
        """The expanded model of one expansion, without what it shares with the base."""
        stock, config = type(self).__mro__[type(self).__mro__.index(ComposedModel) + 1], deepcopy(self.config)
        kind = type(config).__bases__[0]
        config.__class__, config.scale_surgery = config_of(kind), plan
        model = model_of(stock, kind)(config)
        for module in model.modules():
            module._parameters.update({name: None for name in module._parameters if name not in EXPANSION_NAMES})
            kept = [name for name in module._buffers if name not in module._non_persistent_buffers_set]
            module._buffers.update(dict.fromkeys(kept))
        return model

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """Load as transformers does, refuse what does not fit, and mix all expansions: see `set_expansion`.

        `strict_loading=False` takes what is missing as it was initialised, as transformers does;
        `output_loading_info=True` then says what that is.
        """
        places = kwargs.get("device_map")
        if places in SPREADING or _spreads(places):
            raise ValueError(
                f"device_map: is {places!r}, expected one device: the paths of a composed model run side by side. Load "
                "the base with that device_map, then each extract by scale_surgery.load_expansion(model, EXTRACT, "
                "name=...)."
            )
        is_strict, says_more = kwargs.pop("strict_loading", True), kwargs.pop("output_loading_info", False)
        kwargs.update(cls._key_mapping(*args, **kwargs))
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        if is_strict:
            model.check_loaded(info)
        model.begin()
        return (model, info) if says_more else model

    @classmethod
    def _key_mapping(cls, path, *args, config=None, **kwargs) -> dict[str, Any]:
        """What transformers 4 is told of names: it has some modules under those of the files, and renames none."""
        if transformers.__version__ >= "5" or getattr(cls, "_checkpoint_conversion_mapping", {}):
            return {}
        config = config or cls.config_class.from_pretrained(path, *args, **kwargs)
        renamed = config.scale_surgery["renamed"].items()
        pairs = [(f"expanded_models.{name}.", pair) for name, own in renamed for pair in own.items()]
        mapping = {f"^{re.escape(prefix + found)}$": prefix + wanted for prefix, (wanted, found) in pairs}
        return {"key_mapping": mapping} if mapping else {}

    check_loaded = ExpandedPreTrainedModel.check_loaded

    def begin(self) -> None:
        """Let every expansion stand on the base's weights, train nothing of these, and mix all paths."""
        for own in self.parameters():
            own.requires_grad_(False)
        for model in self.expanded_models.values():
            self.lend(model)
            model.freeze_base()
        self.set_expansion(self.expansions, **self.config.scale_surgery["mixing"])

    def initialize_weights(self):
        """Initialise as the stock model does; expansion tensors that no file gave are zero."""
        stock = super().initialize_weights

        def initialize() -> None:
            # what is the base's is lent to them once it is there
            for module in getattr(self, "expanded_models", nn.ModuleDict()).modules():
                module._is_hf_initialized = True
            stock()

        zero_missing(self, initialize)

    @classmethod
    def is_custom_code(cls) -> bool:
        """What initialises is stock code: see `ExpandedPreTrainedModel.is_custom_code`."""
        return False


def composed_config_of(stock: type, module: str = "") -> type:
    """The configuration of composed models: one more key, `scale_surgery`, says which expansions and how they mix."""
    return _make_config(stock, module or __name__)


@cache
def _make_config(stock: type, module: str) -> type:
    own = {"model_type": COMPOSED + stock.model_type, "__module__": module, "__doc__": composed_config_of.__doc__}
    return type(f"Composed{stock.__name__}", (stock,), own)


@cache
def composed_model_of(stock: type, stock_config: type) -> type:
    """The composed form of a stock language model on disk.

    Args:
        stock: Stock model class.
        stock_config: Configuration class of the base model.
    """
    suffix = "" if stock_config is stock.config_class else f"_of_{stock_config.__name__}"
    own = {"config_class": composed_config_of(stock_config), "__module__": __name__}
    # where GenerationMixin is no direct base, transformers makes another class of a remote one that generates
    bases = (ComposedPreTrainedModel, ComposedModel, stock, GenerationMixin)
    made = composed_class(stock, bases, name=f"Composed{stock.__name__}{suffix}", **own)
    convert_as(made, stock, stock_config)
    return made


def __getattr__(name: str) -> Any:
    if not name.startswith("Composed"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    own, _, config = name.replace("Composed", "Scale", 1).partition("_of_")
    if own.endswith("Config"):
        return composed_config_of(stock_class(own, PretrainedConfig, __name__))
    stock = stock_class(own, PreTrainedModel, __name__)
    stock_config = stock_class(f"Scale{config}", PretrainedConfig, __name__) if config else stock.config_class
    return composed_model_of(stock, stock_config)
