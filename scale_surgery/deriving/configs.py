"""Configs of transformers, made of what config.json says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.code_names import without_kernels
from scale_surgery.checkpoint.files import scratch_folder
from scale_surgery.checkpoint.names import CONFIG_FILE
from scale_surgery.deriving.own_code import own_config_class
from scale_surgery.errors import UnsupportedFamilyError
from scale_surgery.running.loading import needs_own_code


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
