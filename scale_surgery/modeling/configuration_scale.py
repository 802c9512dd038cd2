"""Configurations of expanded models: each a stock class with a model type of its own, made when its name is asked for.

`ScaleQwen3Config` is made of `Qwen3Config`. It has one more key, `scale_surgery`:

    base                what all paths pass through
        hidden              width of the hidden state
        base_model, layers, last      names of the module that holds the layers, of these in it, and of its last norm
        kind_of_layer, kinds          layers may be of several kinds: the kind of each, and what is said of a kind:
            modules                       a module's name: its kind, and widths of the parts of a fused projection
            attention                     an attention module's name: its heads, and what says how many there are
        softcap, softcap_key          what caps the logits, and the key that says so in the config
    expansions          a list; of each expansion
        name, dtype
        expanded_layers     the layers that are widened
        collaborative       layers that have a W12, and the groups of linears in them that do
        widths              what is added: up_width to the hidden state, up_kv_heads, up_inner_width to an MLP
        model, head         modules outside the layers: a module's name, and what the expansion adds to it
        expanded, passing, attention  the same of a layer that is widened, of one that is not, and new heads; where
                            layers are of several kinds, `kinds` and `kind_of_layer` as above
        enter               "hook" where up streams begin before the first layer, and not beside the embedding
        fused, fused_head   whether base weights and blocks are one matrix
        problems            why its path cannot run beside others
        origin              what it was made of; nothing here reads it
    router              the router's name and numbers, if there is one
"""

from __future__ import annotations

from functools import cache
from typing import Any

import transformers


def find_stock_class(name: str, kind: type, module: str) -> Any:
    """The class of transformers that an expanded class is made of.

    Args:
        name: Name of the expanded class: `Scale`, and the name of the stock class.
        kind: What it has to be, a configuration or a model.
        module: Module that was asked for it.

    Raises:
        AttributeError: If there is none.
    """
    stock = getattr(transformers, name.removeprefix("Scale"), None) if name.startswith("Scale") else None
    if not (isinstance(stock, type) and issubclass(stock, kind)):
        raise AttributeError(
            f"module {module!r} has no attribute {name!r}: transformers {transformers.__version__} has no such class, "
            "without Scale. Install a release that has it; a model whose code lies elsewhere is not supported."
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
def _make_config(stock: type, module: str) -> type:
    if [int(number) for number in transformers.__version__.split(".")[:2]] < [5, 5]:
        transformers.logging.get_logger("transformers").warning_once(
            "transformers before 5.5 can run code that a config.json names (CVE-2026-4372, CVE-2026-5241). Install "
            "a newer release, or load only files that you trust."
        )
    attributes = {"model_type": f"scale_{stock.model_type}", "__module__": module, "__doc__": config_of.__doc__}
    return type(f"Scale{stock.__name__}", (stock,), attributes)


def __getattr__(name: str) -> Any:
    return config_of(find_stock_class(name, transformers.PretrainedConfig, __name__))
