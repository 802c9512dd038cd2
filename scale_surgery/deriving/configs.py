"""Configs of transformers, made of what config.json says."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.names import CONFIG_FILE
from scale_surgery.errors import UnsupportedFamilyError
from scale_surgery.running.options import RunOptions


def config_of(config: Mapping[str, Any], place: str, run: RunOptions = RunOptions()) -> Any:
    """Make the stock config of a base model.

    Args:
        config: Parsed config.json.
        place: Folder of the model, where code of its own lies.
        run: Whether such code may run: trust_remote_code.

    Returns:
        A config as AutoConfig gives it.

    Raises:
        UnsupportedFamilyError: If this release of transformers does not know its model type.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    model_type = config.get("model_type")
    if run.trust_remote_code and "AutoConfig" in (config.get("auto_map") or {}):
        return AutoConfig.from_pretrained(place, trust_remote_code=True)
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise UnsupportedFamilyError(
            f"config.json: model_type is {model_type!r}, expected one that the installed transformers knows. Install a "
            "newer release of transformers, or let the model's own code run: --trust-remote-code."
        )
    # as from a folder: numbers that JSON does not have are spelled out in it
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / CONFIG_FILE).write_text(json.dumps(dict(config)), encoding="utf-8")
        return CONFIG_MAPPING[model_type].from_pretrained(folder)
