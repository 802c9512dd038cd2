"""Configurations of expanded models: each a stock class with a model type of its own, made when its name is asked for.

`ScaleQwen3Config` is made of `Qwen3Config`. It has one more key, `scale_surgery`:

    base                the modules through which all paths pass
        hidden              width of the hidden state
        base_model, layers, last      names of the module that holds the layers, of these in it, and of its last norm
        kind_of_layer, kinds          layers may be of several kinds: the kind of each layer, and for each kind
            modules                       a module's name: its kind, and widths of the parts of a fused projection
            attention                     an attention module's name: its heads, and the names of numbers of heads
        not_loaded              paths of tensors in the base's files that its class does not load, if any
        softcap, softcap_key          the cap of the logits, and its key in the config
    expansions          a list with an entry for each expansion
        name, dtype
        expanded_layers     the widened layers
        collaborative       layers with W12, and the groups of linears in them that have it
        widths              the added widths: up_width of the hidden state, up_kv_heads, up_inner_width of an MLP
        model, head         modules outside the layers: a module's name, and its additions
        expanded, passing, attention  additions to a widened layer, to another layer, and new heads; if layers are of
                            several kinds, `kinds` and `kind_of_layer` as above
        enter               "hook" if up streams enter before the first layer, and not beside the embedding
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
    """Find the class of transformers of which one of our classes is made.

    Args:
        name: Name of our class: the prefix and the name of the stock class.
        kind: Class that it has to be a subclass of, of configurations or models.
        module: Module that was asked for our class.
        prefix: Prefix before the name of the stock class.

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
    """The configuration of what is expanded of a stock model: one more key, `scale_surgery`, says what and how wide.

    Args:
        stock: Configuration class of the base model.
        module: Where the class is found if not here; a model that is saved takes the files of that module along.
    """
    return _make_config(stock, module or __name__)


@cache
def _make_config(stock: Any, module: str) -> type:
    warn_of_old_release()
    attributes = {"model_type": f"scale_{stock.model_type}", "__module__": module, "__doc__": config_of.__doc__}
    return type(f"Scale{stock.__name__}", (stock,), attributes)


def __getattr__(name: str) -> Any:
    return config_of(find_stock_class(name, transformers.PretrainedConfig, __name__))
