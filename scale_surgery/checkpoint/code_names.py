"""Find remote code in unexpected keys of a model's JSON files.

Kernels: `attn_implementation`, `experts_implementation` and similar keys may name a repository instead of an
implementation, as `org/kernel@revision:function`, also separately for each part of a model. transformers downloads and
runs it.
Aliases: an `attribute_map` in a config may make any other key an alias of these keys.
Code elsewhere: `auto_map` may name a class in another repository than the folder that the user has reviewed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from scale_surgery.errors import Problem

IMPLEMENTATION = re.compile(r"_?(attn|experts)_implementation(_internal)?")
# names of all transformers releases from 4.57 on; a test compares them with the installed release
BUILT_IN = frozenset(
    (
        *("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4"),
        *("paged|eager", "paged|sdpa", "paged|flash_attention_2", "paged|flash_attention_3", "paged|flash_attention_4"),
        *("batched_mm", "grouped_mm", "deepgemm", "deepgemm_megamoe", "sonicmoe"),
    )
)
ALIASES = "attribute_map"
AUTO_MAP = "auto_map"


def kernel_problems(config: Any) -> Iterator[Problem]:
    """Yield a problem for each key of a config that names a kernel, or that defines aliases."""
    for place, key, value in _entries(config):
        if key == ALIASES:
            yield Problem("config-alias", place, value=value)
        for name in _texts(value) if IMPLEMENTATION.fullmatch(key) else ():
            if name not in BUILT_IN:
                yield Problem("config-kernel", place, value=name)


def code_elsewhere(content: Any) -> Iterator[Problem]:
    """Yield a problem for each class of another repository in a parsed JSON file."""
    for place, key, value in _entries(content):
        if key == AUTO_MAP:
            yield from (Problem("code-elsewhere", place, name=name) for name in _texts(value) if "--" in name)


def without_kernels(config: Any) -> Any:
    """Return a config without any implementation key: some of transformers' own may not be installed."""
    if isinstance(config, list):
        return list(map(without_kernels, config))
    if not isinstance(config, dict):
        return config
    kept = {key: value for key, value in config.items() if key != ALIASES and not IMPLEMENTATION.fullmatch(str(key))}
    return {key: without_kernels(value) for key, value in kept.items()}


def _entries(content: Any, place: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield the path, the key and the value of all keys in nested JSON."""
    if isinstance(content, dict):
        for key, value in content.items():
            inside = f"{place}.{key}" if place else key
            yield inside, key, value
            yield from _entries(value, inside)
    elif isinstance(content, list):
        for number, value in enumerate(content):
            yield from _entries(value, f"{place}[{number}]")


def _texts(value: Any) -> Iterator[str]:
    """Yield the strings in a value, which may have one per part of a model."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inside in value.values() if isinstance(value, dict) else value:
            yield from _texts(inside)
