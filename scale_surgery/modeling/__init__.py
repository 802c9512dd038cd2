"""The code that travels with expanded checkpoints, and its registration for use without remote code."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
# prefix of model types, of names of files and, capitalised, of classes; and the form of such a model
CODES = {"scale": "expanded", "fused": "fused"}
# the widest first: a model that sees images is saved with its image modules
AUTO_CLASSES = ("AutoModelForImageTextToText", "AutoModelForCausalLM", "AutoModel")


def code_text(file: str) -> str:
    """Read the text of an exported code file."""
    return (FOLDER / file).read_text(encoding="utf-8")


def code_hash(file: str) -> str:
    """Compute the sha256 of an exported code file."""
    return hashlib.sha256((FOLDER / file).read_bytes()).hexdigest()


def block_names() -> tuple[str, ...]:
    """List the last parts of the names of an expansion's tensors."""
    kinds: Any = import_module(f"{__name__}.expanded_modules").KINDS
    return tuple(dict.fromkeys(name for _, blocks in kinds.values() for name in blocks.group_of))


def stock_type(model_type: object) -> str:
    """Return the model type of the base of a model, by its own model type."""
    code, _, base_type = str(model_type).partition("_")
    return base_type if code in CODES else str(model_type)


def expanded_classes(stock: Mapping[str, type], config: type) -> dict[str, Any]:
    """Make the classes of an expanded model by auto class, AutoConfig included, for use in this process alone."""
    config_of, model_of = _makers("scale")
    return {
        "AutoConfig": config_of(config),
        **{auto_class: model_of(model_class, config) for auto_class, model_class in stock.items()},
    }


class _ExpandedConfigs(dict[str, Any]):
    """Configuration classes by model type; those of expanded and fused models are made on the first look-up."""

    def __contains__(self, key: object) -> bool:
        from transformers import CONFIG_MAPPING

        is_ours = isinstance(key, str) and stock_type(key) != key
        return super().__contains__(key) or (is_ours and stock_type(key) in CONFIG_MAPPING)

    def __missing__(self, key: str) -> Any:
        self[key] = _register_type(stock_type(key), key.partition("_")[0])
        return self[key]


def is_part(stock: Any, stock_config: Any) -> bool:
    """Return whether a class is the language model inside a larger one; transformers may list it for the larger one."""
    # such as Qwen3_5ForCausalLM, which transformers lists for Qwen3_5Config
    return getattr(stock, "config_class", None) in stock_config.sub_configs.values()


def _register_type(base_type: str, code: str) -> Any:
    """Register the forms of all stock classes of a model type; return that of the configuration."""
    from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

    stock_config, (config_of, model_of) = CONFIG_MAPPING[base_type], _makers(code)
    config = config_of(stock_config)
    config.register_for_auto_class("AutoConfig")
    for auto_class in (AutoModel, AutoModelForImageTextToText, AutoModelForCausalLM):
        stock = auto_class._model_mapping.get(stock_config, None)
        if stock is None or getattr(stock, "config_class", None) is None or is_part(stock, stock_config):
            continue
        model = model_of(stock, stock_config)
        model.register_for_auto_class(auto_class.__name__)
        auto_class.register(config, model, exist_ok=True)
    return config


def _makers(code: str) -> tuple[Any, Any]:
    """Import the functions that make configuration and model classes of stock ones."""
    configuration: Any = import_module(f"{__name__}.configuration_{code}")
    modeling: Any = import_module(f"{__name__}.modeling_{code}")
    return configuration.config_of, modeling.model_of


def register() -> None:
    """Let transformers know every expanded model type, so that no remote code is needed to load one.

    The classes of a type are made when the first model of it is loaded.
    """
    from transformers import CONFIG_MAPPING

    mapping: Any = CONFIG_MAPPING
    if not isinstance(mapping._extra_content, _ExpandedConfigs):
        mapping._extra_content = _ExpandedConfigs(mapping._extra_content)
