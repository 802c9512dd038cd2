"""The stock config of a base model: of a class of transformers, or of code in its folder that the user trusts."""

from __future__ import annotations

import json
import keyword
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.code_names import without_kernels
from scale_surgery.checkpoint.files import scratch_folder
from scale_surgery.checkpoint.names import CONFIG_FILE
from scale_surgery.errors import UnsupportedFamilyError
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
    advice = " Its own code says what it is: read it, then give --trust-remote-code, which runs it. Or install" * (
        needs_own_code(config)
    )
    raise UnsupportedFamilyError(
        f"config.json: model_type is {model_type!r}, expected one that the installed transformers knows."
        f"{advice or ' Install'} a release of transformers that has it."
    )


def own_config_class(config: Mapping[str, Any], folder: Path) -> Any:
    """Import the classes that config.json names, and let transformers' auto classes know them."""
    import transformers
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    names = _named(config)
    if problems := _name_problems(names, folder):
        raise UnsupportedFamilyError.from_problems(problems)
    with translated("code-not-imported", f"{folder}: auto_map of config.json"):
        classes: dict[str, Any] = {auto: get_class_from_dynamic_module(name, folder) for auto, name in names.items()}
    stock = classes[GENERATES]
    if problems := _class_problems(stock, names[GENERATES]):
        raise UnsupportedFamilyError.from_problems(problems)
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


def _name_problems(names: Mapping[str, str], folder: Path) -> list[str]:
    """Names that are no class of a Python file in the folder, a line each."""
    problems = []
    if GENERATES not in names:
        problems.append(f"config.json: auto_map has no {GENERATES}, expected the class of a language model.")
    for auto, name in names.items():
        module, _, class_name = name.partition(".")
        if "--" in name:
            problems.append(
                f"config.json: auto_map.{auto} is {name!r}, code of another repository. Put its files into {folder}, "
                f"and write {name.partition('--')[2]!r}."
            )
        elif not all(part.isidentifier() and not keyword.iskeyword(part) for part in (module, class_name)):
            problems.append(f"config.json: auto_map.{auto} is {name!r}, expected module.Class.")
        elif not (folder / f"{module}.py").is_file():
            problems.append(f"config.json: auto_map.{auto} is {name!r}, found no {module}.py in {folder}.")
    return problems


def _class_problems(stock: Any, name: str) -> list[str]:
    from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel

    if not (isinstance(stock, type) and issubclass(stock, PreTrainedModel)):
        return [f"{name}: is no PreTrainedModel, expected one with a head."]
    problems = []
    if not issubclass(stock, GenerationMixin):
        problems.append(f"{name}: does not inherit GenerationMixin, so that it cannot generate. Let it inherit it.")
    config: Any = stock.config_class
    if not (isinstance(config, type) and issubclass(config, PretrainedConfig) and config.model_type):
        problems.append(f"{name}: its config_class is {config!r}, expected a PretrainedConfig with a model_type.")
    return problems
