"""Code that the JSON files of a model may name where nobody would expect it.

Kernels: in place of an implementation, `attn_implementation`, `experts_implementation` and their relatives may name a
repository, as `org/kernel@revision:function`, also one for each part of a model. transformers fetches and runs it.
Aliases: a config may hold an `attribute_map`, by which any other key stands for one of these.
Code elsewhere: `auto_map` may name a class in another repository, which is not the folder that a user has read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from scale_surgery.errors import Problem

IMPLEMENTATION = re.compile(r"_?(attn|experts)_implementation(_internal)?")
# of all releases of transformers from 4.57 on; a test compares them with the installed one
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
    """Keys of a parsed config that name kernels, or let other keys name them."""
    for place, key, value in _entries(config):
        if key == ALIASES:
            yield Problem("config-alias", place, value=value)
        for name in _texts(value) if IMPLEMENTATION.fullmatch(key) else ():
            if name not in BUILT_IN:
                yield Problem("config-kernel", place, value=name)


def code_elsewhere(content: Any) -> Iterator[Problem]:
    """Classes of another repository that a parsed JSON file names."""
    for place, key, value in _entries(content):
        if key == AUTO_MAP:
            yield from (Problem("code-elsewhere", place, name=name) for name in _texts(value) if "--" in name)


def without_kernels(config: Any) -> Any:
    """A parsed config that names no implementation at all: of transformers' own, some are not installed."""
    if isinstance(config, list):
        return list(map(without_kernels, config))
    if not isinstance(config, dict):
        return config
    kept = {key: value for key, value in config.items() if key != ALIASES and not IMPLEMENTATION.fullmatch(str(key))}
    return {key: without_kernels(value) for key, value in kept.items()}


def _entries(content: Any, place: str = "") -> Iterator[tuple[str, str, Any]]:
    """All keys of nested JSON objects: the place, the key and the value."""
    if isinstance(content, dict):
        for key, value in content.items():
            inside = f"{place}.{key}" if place else key
            yield inside, key, value
            yield from _entries(value, inside)
    elif isinstance(content, list):
        for number, value in enumerate(content):
            yield from _entries(value, f"{place}[{number}]")


def _texts(value: Any) -> Iterator[str]:
    """The texts in a value, which may hold one for each part of a model."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inside in value.values() if isinstance(value, dict) else value:
            yield from _texts(inside)
