"""Expanded models: each a stock class with an expanding mixin before it, made when its name is asked for.

`ScaleQwen3ForCausalLM` is made of `Qwen3ForCausalLM`. Where a model type uses the class of another, as InternLM3 uses
Llama's, the name says so: `ScaleLlamaForCausalLM_of_InternLM3Config`. This file travels with the checkpoint: it opens
no file.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel

from .configuration_scale import config_of, stock_class

# transformers 4 copies the files that this one imports itself, and no others
from .expanded_attention import SPLIT_ATTENTION  # noqa: F401
from .expanded_causal_lm import ExpandedForCausalLM
from .expanded_fused import FusedLinear  # noqa: F401
from .expanded_mixture import Mixture  # noqa: F401
from .expanded_model import ExpandedPreTrainedModel
from .expanded_modules import EXPANSION_NAMES  # noqa: F401
from .expanded_routing import RouterState  # noqa: F401
from .expanded_streams import Streams  # noqa: F401


def model_of(stock: type, stock_config: type, module: str = "") -> type:
    """The expanded form of a stock model; it reads the names on disk that the stock model reads.

    Args:
        stock: Stock model class.
        stock_config: Configuration class of the base model.
        module: Where the class is found if not here, and that of its configuration.

    Returns:
        The class. One that generates also routes; one without a head gives hidden states, [base stream, up stream].
    """
    return _make(stock, stock_config, config_of(stock_config, module), module or __name__)


@cache
def _make(stock: type, stock_config: type, config: type, module: str) -> type:
    suffix = "" if stock_config is stock.config_class else f"_of_{stock_config.__name__}"
    # where GenerationMixin is no direct base, transformers makes another class of a remote one that generates
    generates = issubclass(stock, GenerationMixin)
    mixin, *more = (ExpandedForCausalLM, GenerationMixin) if generates else (ExpandedPreTrainedModel,)
    own = {"config_class": config, "__module__": module, "__doc__": mixin.__doc__}
    made = type(f"Scale{stock.__name__}{suffix}", (mixin, stock, *more), own)
    convert_as(made, stock, stock_config)
    return made


def convert_as(expanded: type, stock: type, stock_config: type) -> None:
    """Let transformers 5 convert names and tensors on disk as for the stock class; code of others gets no conversion.

    Without it the experts of a mixture, one tensor each on disk, would be initialised anew. transformers 4 reads what
    it knows of from the class.
    """
    try:
        from transformers.conversion_mapping import (
            get_checkpoint_conversion_mapping,
            register_checkpoint_conversion_mapping,
        )
    except ImportError:
        return
    for own, base in {
        expanded.__name__: stock.__name__,
        expanded.config_class.model_type: stock_config.model_type,
    }.items():
        if (known := get_checkpoint_conversion_mapping(base)) is not None:
            register_checkpoint_conversion_mapping(own, known, overwrite=True)


def __getattr__(name: str) -> Any:
    own, _, config = name.partition("_of_")
    stock = stock_class(own, PreTrainedModel, __name__)
    return model_of(stock, stock_class(f"Scale{config}", PretrainedConfig, __name__) if config else stock.config_class)
