"""Configurations of fused models, each made of a stock one when its name is asked for.

`FusedQwen3Config` has the numbers of the whole model for a server, such as the hidden size and the heads of base and
expansion together. Stock classes refuse some of these numbers, so it is no subclass of one; but it has every value of
one. Its key `scale_surgery` is that of the expanded model (`configuration_scale`), with a few more keys:

    stock               values of the base's config.json that differ here; null if the base has none
    expansions          a list with one entry
        fused               true
        first_wide_layer    the first layer whose input has an up stream; -1 if the embedding has it already
        own_columns         if the embedding is also the head, as in the base: the number of its last columns, which the
                            head does not read; null if the head is a matrix of its own
        fork                the first layer that two paths pass through; null if there is one path
    gram                with two paths: rows of the matrix by which the last norm decides
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

from transformers import PretrainedConfig

from .configuration_scale import find_stock_class
from .expanded_releases import warn_of_old_release


def config_of(stock: type, module: str = "") -> type:
    """Make the configuration class of a fused model.

    Args:
        stock: Configuration class of the base model.
        module: Module of the class if not this one; a saved model takes the files of that module along.
    """
    return _make_config(stock, module or __name__)


@cache
def _make_config(stock: Any, module: str) -> type:
    warn_of_old_release()

    class FusedConfig(PretrainedConfig):
        """The configuration of a base and an expansion whose weights are one matrix in each linear."""

        model_type = f"fused_{stock.model_type}"
        has_no_defaults_at_init = True

        def __init__(self, scale_surgery: Any = None, **values: Any) -> None:
            inside = make_stock(values, scale_surgery)
            known = {name: value for name, value in vars(inside).items() if not name.startswith("_")}
            parts = {name for name, value in known.items() if isinstance(value, PretrainedConfig)}
            values = {name: value for name, value in values.items() if name not in parts}
            settings = known | values
            # the base class reads types of layers for differences between layers, and knows fewer than some stock ones
            late = {
                name: settings.pop(name) for name in (*LATE, *map(stock.attribute_map.get, LATE)) if name in settings
            }
            super().__init__(**settings, scale_surgery=scale_surgery)
            for name, value in late.items():
                setattr(self, name, value)

        def __getattr__(self, name: str) -> Any:
            # an attribute of the stock class; one that it computes, such as types of layers, is of the base's values
            key = stock.attribute_map.get(name, name)
            attribute = MISSING if key.startswith("_") else getattr(stock, key, MISSING)
            if attribute is MISSING or "scale_surgery" not in vars(self):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            is_computed = isinstance(attribute, property) or callable(attribute)
            return getattr(self.stock_config(), name) if is_computed else attribute

        def stock_config(self) -> Any:
            """Make the configuration of the stock model that is widened."""
            values = {name: value for name, value in vars(self).items() if not name.startswith("_")}
            if "_heterogeneity_spec" in vars(self):
                values["per_layer_config"] = self.to_dict()["per_layer_config"]
            inside = make_stock(values, self.scale_surgery)
            # a wider head may be one of its own
            for part in (inside, inside.get_text_config(decoder=True)):
                part.tie_word_embeddings = self.tie_word_embeddings
            # without its type transformers would rename the tensors of the model inside once more
            inside.model_type, inside._attn_implementation = self.model_type, self._attn_implementation
            return inside

    def make_stock(values: dict[str, Any], specs: dict[str, Any] | None) -> Any:
        """Make the stock configuration of these values, with those of the base where they differ."""
        # transformers 4 makes a configuration without values to compare with
        base_values = {} if specs is None else specs["stock"]
        stock_values = {name: value for name, value in values.items() if name not in (*OURS, *base_values)}
        stock_values |= {name: value for name, value in base_values.items() if value is not None}
        return stock(**deepcopy(stock_values))

    for name in SAID:
        if hasattr(stock, name):
            setattr(FusedConfig, name, getattr(stock, name))
    FusedConfig.__name__ = FusedConfig.__qualname__ = f"Fused{stock.__name__}"
    FusedConfig.__module__ = module
    return FusedConfig


MISSING = object()
# set after all others; transformers reads rotary settings of several types of layers by `layer_types`
LATE = ("layer_types", "mlp_layer_types", "per_layer_config", "rope_parameters")
# class attributes that describe models; no stock class has all of them
SAID: tuple[str, ...] = ("attribute_map", "sub_configs", "keys_to_ignore_at_inference")
SAID += tuple(f"base_model_{kind}_plan" for kind in ("tp", "pp", "ep", "fsdp"))
# keys that a stock configuration does not have, or gives to transformers itself
OURS: tuple[str, ...] = ("scale_surgery", "auto_map", "architectures", "model_type", "transformers_version")
OURS += ("ignore_keys_at_rope_validation",)


def __getattr__(name: str) -> Any:
    return config_of(find_stock_class(name, PretrainedConfig, __name__, "Fused"))
