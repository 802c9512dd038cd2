"""The stock config of a base model: of a class of transformers, or of code in its folder that the user trusts."""

from __future__ import annotations

import json
import keyword
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.code_names import without_kernels
from scale_surgery.checkpoint.files import scratch_folder
from scale_surgery.checkpoint.names import CONFIG_FILE
from scale_surgery.errors import Problem, UnsupportedFamilyError
from scale_surgery.modeling import AUTO_CLASSES
from scale_surgery.running.loading import needs_own_code, translated

GENERATES = "AutoModelForCausalLM"


def config_of(config: Mapping[str, Any], code: Path | None = None) -> Any:
    """Make the stock config of a base model."""
    made = _config_class(config, code)
    # as from a folder: numbers that JSON does not have are spelled out in it
    with scratch_folder() as folder:
        (folder / CONFIG_FILE).write_text(json.dumps(without_kernels(dict(config))), encoding="utf-8")
        return made.from_pretrained(folder)


def _config_class(config: Mapping[str, Any], code: Path | None) -> Any:
    from transformers import CONFIG_MAPPING

    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type]
    if code is not None and needs_own_code(config):
        return own_config_class(config, code)
    raise UnsupportedFamilyError(
        Problem(
            "code-not-trusted" if needs_own_code(config) else "model-type-unknown", "config.json", model_type=model_type
        )
    )


def own_config_class(config: Mapping[str, Any], folder: Path) -> Any:
    """Import the classes that config.json names, and let transformers' auto classes know them."""
    import transformers
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    names = _named(config)
    if problems := [*_name_problems(names, folder)]:
        raise UnsupportedFamilyError(*problems)
    with translated("code-not-imported", f"{folder}: auto_map of config.json"):
        classes: dict[str, Any] = {auto: get_class_from_dynamic_module(name, folder) for auto, name in names.items()}
    stock = classes[GENERATES]
    if problems := [*_class_problems(stock, names[GENERATES])]:
        raise UnsupportedFamilyError(*problems)
    for auto, stock_class in classes.items():
        # one file imported by itself and by another are two modules to transformers, and so are their classes
        if getattr(stock_class, "config_class", None) is stock.config_class:
            getattr(transformers, auto).register(stock.config_class, stock_class, exist_ok=True)
    return stock.config_class


def own_code_of(config: Any, classes: Mapping[str, type]) -> dict[str, str]:
    """Which of a model's classes lie in its own folder."""
    if not needs_own_code({"model_type": config.model_type, "auto_map": getattr(config, "auto_map", None)}):
        return {}
    return {auto: name for auto, name in _named({"auto_map": config.auto_map}).items() if auto in classes}


def _named(config: Mapping[str, Any]) -> dict[str, str]:
    """The classes that config.json names for auto classes of language models."""
    stated = config.get("auto_map")
    known = stated if isinstance(stated, Mapping) else {}
    return {auto: str(known[auto]) for auto in AUTO_CLASSES if auto in known}


def _name_problems(names: Mapping[str, str], folder: Path) -> Iterator[Problem]:
    """Find names that are no class of a Python file in the folder."""
    if GENERATES not in names:
        yield Problem("class-not-named", f"config.json: auto_map.{GENERATES}")
    for auto, name in names.items():
        module, _, class_name = name.partition(".")
        where = f"config.json: auto_map.{auto}"
        if "--" in name:
            yield Problem("code-elsewhere", where, name=name)
        elif not all(part.isidentifier() and not keyword.iskeyword(part) for part in (module, class_name)):
            yield Problem("class-name-unfit", where, name=name)
        elif not (folder / f"{module}.py").is_file():
            yield Problem("class-file-missing", where, name=name, module=module, folder=folder)


def _class_problems(stock: Any, name: str) -> Iterator[Problem]:
    from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel

    if not (isinstance(stock, type) and issubclass(stock, PreTrainedModel)):
        yield Problem("class-no-model", name)
        return
    if not issubclass(stock, GenerationMixin):
        yield Problem("class-without-generation", name)
    config: Any = stock.config_class
    if not (isinstance(config, type) and issubclass(config, PretrainedConfig) and config.model_type):
        yield Problem("class-of-other-config", name, config=repr(config))
