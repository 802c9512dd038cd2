"""Configurations of expanded models: each a stock class with a model type of its own, made when its name is asked for.

`ScaleQwen3Config` is made of `Qwen3Config`. This file travels with the checkpoint: it opens no file.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import transformers


def stock_class(name: str, kind: type, module: str) -> Any:
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
    return _make(stock, module or __name__)


@cache
def _make(stock: type, module: str) -> type:
    if [int(number) for number in transformers.__version__.split(".")[:2]] < [5, 5]:
        transformers.logging.get_logger("transformers").warning_once(
            "transformers before 5.5 can run code that a config.json names (CVE-2026-4372, CVE-2026-5241). Install "
            "a newer release, or load only files that you trust."
        )
    own = {"model_type": f"scale_{stock.model_type}", "__module__": module, "__doc__": config_of.__doc__}
    return type(f"Scale{stock.__name__}", (stock,), own)


def __getattr__(name: str) -> Any:
    return config_of(stock_class(name, transformers.PretrainedConfig, __name__))
