"""Configs of transformers, made of what config.json says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from scale_surgery.checkpoint.files import scratch_folder
from scale_surgery.checkpoint.names import CONFIG_FILE
from scale_surgery.errors import UnsupportedFamilyError


def config_of(config: Mapping[str, Any]) -> Any:
    """Make the stock config of a base model.

    Args:
        config: Parsed config.json.

    Returns:
        A config as AutoConfig gives it.

    Raises:
        UnsupportedFamilyError: If this release of transformers does not know its model type.
    """
    from transformers import CONFIG_MAPPING

    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        own = " A model whose code lies in its own folder cannot be expanded." if config.get("auto_map") else ""
        raise UnsupportedFamilyError(
            f"config.json: model_type is {model_type!r}, expected one that the installed transformers knows.{own} "
            "Install a release of transformers that has it."
        )
    # as from a folder: numbers that JSON does not have are spelled out in it
    with scratch_folder() as folder:
        (folder / CONFIG_FILE).write_text(json.dumps(_without_kernels(config)), encoding="utf-8")
        return CONFIG_MAPPING[model_type].from_pretrained(folder)


def _without_kernels(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config that names no kernels: some are not installed, and others transformers would fetch and run."""
    kept = {key: value for key, value in config.items() if not str(key).endswith("_implementation")}
    return {key: _without_kernels(value) if isinstance(value, Mapping) else value for key, value in kept.items()}
