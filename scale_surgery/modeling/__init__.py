"""The code that travels with expanded checkpoints, and its registration for use without remote code."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from scale_surgery.planning.architecture import Architecture
from scale_surgery.planning.families import FAMILIES

FOLDER = Path(__file__).parent
# release -> exported code file -> sha256; python -m tests.test_trust writes the entry of this one
RELEASES_FILE = "releases.json"


def code_text(file: str) -> str:
    """Text of one exported code file."""
    return (FOLDER / file).read_text(encoding="utf-8")


def code_hash(file: str) -> str:
    """sha256 of one exported code file."""
    return hashlib.sha256((FOLDER / file).read_bytes()).hexdigest()


def is_ours(file: str, digest: str) -> bool:
    """Whether a code file, by its name and sha256, is that of this release."""
    return (FOLDER / file).is_file() and digest == code_hash(file)


@cache
def released_hashes() -> dict[str, frozenset[str]]:
    """sha256 of every released form of each exported code file, this release's included."""
    releases = json.loads((FOLDER / RELEASES_FILE).read_text(encoding="utf-8"))
    found: dict[str, set[str]] = {}
    for release in releases.values():
        for file, digest in release.items():
            found.setdefault(file, set()).add(digest)
    return {file: frozenset(digests) for file, digests in found.items()}


def class_name(stock: str) -> str:
    """Name of the expanded form of a stock class."""
    return f"Scale{stock}"


def model_classes(family: Architecture) -> tuple[Any, Any, Any]:
    """The configuration, model and language-model classes of a family, from this package."""
    configuration = import_module(f"scale_surgery.modeling.configuration_{family.expanded_type}")
    modeling = import_module(f"scale_surgery.modeling.modeling_{family.expanded_type}")
    return (
        getattr(configuration, class_name(family.config_class)),
        getattr(modeling, class_name(family.classes["AutoModel"])),
        getattr(modeling, class_name(family.classes["AutoModelForCausalLM"])),
    )


def auto_map(family: Architecture) -> dict[str, str]:
    """The `auto_map` of an expanded model's config.json: local files only."""
    return {
        "AutoConfig": f"configuration_{family.expanded_type}.Scale{family.config_class}",
        "AutoModel": f"modeling_{family.expanded_type}.Scale{family.classes['AutoModel']}",
        "AutoModelForCausalLM": f"modeling_{family.expanded_type}.Scale{family.classes['AutoModelForCausalLM']}",
    }


@cache
def register() -> None:
    """Register every expanded family with transformers, so that no remote code is needed to load one."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    for family in FAMILIES.values():
        config, model, language_model = model_classes(family)
        AutoConfig.register(family.expanded_type, config, exist_ok=True)
        AutoModel.register(config, model, exist_ok=True)
        AutoModelForCausalLM.register(config, language_model, exist_ok=True)
        # save_pretrained then writes the code files along, as it does for a model loaded as remote code
        config.register_for_auto_class("AutoConfig")
        model.register_for_auto_class("AutoModel")
        language_model.register_for_auto_class("AutoModelForCausalLM")
