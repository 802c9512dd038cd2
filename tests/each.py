"""Parameters that many tests share; of those that prove the same again, the default run leaves most to test-slow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.tiny import FAMILIES

DTYPES = ("float32", "bfloat16")
# a family for each way of being made; the other four are made as these are: mistral and qwen2 as llama, qwen3 with
# norms inside its heads as gemma3_text, gemma2 with norms on both sides of its blocks as gemma3_text
WAYS = ("llama", "gemma3_text", "olmo2", "gpt_neox", "phi3", "gpt2")
# how a base lies on disk has nothing to do with its dtype
FORMS = (("float32", False), ("bfloat16", True))


def mostly(values: Iterable[Any], is_kept: Callable[[Any], bool]) -> list[Any]:
    """Values of a parameter, those that are not kept for `make test-slow` alone."""
    return [value if is_kept(value) else _slow(value) for value in values]


def _slow(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)


each_family = pytest.mark.parametrize("family", FAMILIES)
each_way = pytest.mark.parametrize("family", mostly(FAMILIES, WAYS.__contains__))
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
# an untied base is a single file, a tied one is sharded
each_form = pytest.mark.parametrize(
    ("dtype", "tied"), mostly([(dtype, tied) for dtype in DTYPES for tied in (False, True)], FORMS.__contains__)
)
