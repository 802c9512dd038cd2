"""Configurations of expanded models: subclasses of stock classes, with their own model type. Each is made on demand.

`ScaleQwen3Config` is made from `Qwen3Config`. It has one more key, `scale_surgery`:

    base                the modules through which all paths pass
        hidden              width of the hidden state
        base_model                    name of the module that holds the layers
        layers, last                  names of the layers and of the last norm in this module
        kind_of_layer, kinds          the kind of each layer; a model may have several kinds, each with
            modules                       by name of a module: its kind, and widths of the parts of a fused projection
            attention                     by name of an attention module: its heads, and the attributes and config
                                          keys that hold numbers of heads
        not_loaded              paths of tensors in the base's files that its class does not load, if any
        softcap, softcap_key          the cap of the logits, and its key in the config
    expansions          a list with an entry for each expansion
        name, dtype
        expanded_layers     the widened layers
        collaborative       layers with W12, and the groups of linears in them that have it
        widths              the added widths: up_width of the hidden state, up_kv_heads, up_inner_width of an MLP
        model, head         additions to the modules outside the layers, by name of a module; additions to the head
        expanded, passing   additions to the modules of a widened layer, and of a layer that is not widened
        attention           new heads. If layers are of several kinds, expanded, passing and attention are
                            in `kinds`, as above
        enter               "hook" if up streams enter as zeros before the first layer, not from the embedding
        problems            reasons why its path cannot run beside others
        origin              how it was made; no code here reads it
    router              the router's name and numbers, if there is one
"""

from __future__ import annotations

from functools import cache
from typing import Any

import transformers

# transformers 4 copies the files that this one imports itself, and no others
from .expanded_releases import warn_of_old_release


def find_stock_class(name: str, kind: type, module: str, prefix: str = "Scale") -> Any:
    """Find the class of transformers from which one of our classes is made.

    Args:
        name: Name of our class: the prefix and the name of the stock class.
        kind: Required superclass: that of configurations or of models.
        module: Name of the module that has our class, for the error.
        prefix: Prefix of our class's name.

    Raises:
        AttributeError: If there is none.
    """
    stock = getattr(transformers, name.removeprefix(prefix), None) if name.startswith(prefix) else None
    if not (isinstance(stock, type) and issubclass(stock, kind)):
        raise AttributeError(
            f"module {module!r} has no attribute {name!r}: transformers {transformers.__version__} has no such class, "
            f"without {prefix}. Install a release that has it; a model whose code lies elsewhere is not supported."
        )
    return stock


def config_of(stock: type, module: str = "") -> type:
    """Make the configuration class of an expanded model. Its additional key, `scale_surgery`, describes the expansions.

    Args:
        stock: Configuration class of the base model.
        module: Module of the class; empty for this module. `save_pretrained` also copies the files of that module.
    """
    return _make_config(stock, module or __name__)


@cache
def _make_config(stock: Any, module: str) -> type:
    warn_of_old_release()
    attributes = {"model_type": f"scale_{stock.model_type}", "__module__": module, "__doc__": config_of.__doc__}
    return type(f"Scale{stock.__name__}", (stock,), attributes)


def __getattr__(name: str) -> Any:
    return config_of(find_stock_class(name, transformers.PretrainedConfig, __name__))
