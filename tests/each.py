"""Parameters that many tests share; of those that prove the same again, the default run leaves most to test-slow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import pytest

from tests.tiny import FAMILIES

DTYPES = ("float32", "bfloat16")
# a family for each way of being made; the other four are made as these are: mistral and qwen2 as llama, qwen3 with
# norms inside its heads as gemma3_text, gemma2 with norms on both sides of its blocks as gemma3_text
WAYS = ("llama", "gemma3_text", "olmo2", "gpt_neox", "phi3", "gpt2")
# of these the four in which the default run proves what lasts longer, or what another test proves for all WAYS: phi3 is
# fused as gpt_neox is, olmo2 has norms behind its blocks as gemma3_text has
FEW = ("llama", "gemma3_text", "gpt_neox", "gpt2")
# how a base lies on disk has nothing to do with its dtype
FORMS = (("float32", False), ("bfloat16", True))
# and a family has nothing to do with either: each is taken in one form, and each form by half of the families
FORM_OF = {
    family: FORMS[place % len(FORMS)]
    for place, family in enumerate((*WAYS, *(family for family in FAMILIES if family not in WAYS)))
}


def mostly(values: Iterable[Any], is_kept: Callable[[Any], bool]) -> list[Any]:
    """Values of a parameter, those that are not kept for `make test-slow` alone."""
    return [value if is_kept(value) else _slow(value) for value in values]


def woven(first: Sequence[Any], *others: Sequence[Any], among: Iterable[Any] | None = None) -> list[Any]:
    """All combinations; the default run takes each value of the first beside one of each of the others, in turn."""
    kept = []
    for place, value in enumerate(first):
        row = [value]
        for values in others:
            place, rest = divmod(place, len(values))
            row.append(values[rest])
        kept.append(tuple(row))
    return mostly(product(first if among is None else among, *others), kept.__contains__)


def _slow(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)


each_family = pytest.mark.parametrize("family", FAMILIES)
each_way = pytest.mark.parametrize("family", mostly(FAMILIES, FEW.__contains__))
# for what happens to files: a fused projection and a Conv1D lie there in another way than the usual linear
SHAPES = ("llama", "phi3", "gpt2")
each_shape = pytest.mark.parametrize("family", mostly(FAMILIES, SHAPES.__contains__))
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
# an untied base is a single file, a tied one is sharded
ALL_FORMS = [(dtype, tied) for dtype in DTYPES for tied in (False, True)]
FAMILIES_IN_FORMS = [(family, *form) for family in FAMILIES for form in ALL_FORMS]
each_way_in_a_form = pytest.mark.parametrize(
    ("family", "dtype", "tied"),
    mostly(FAMILIES_IN_FORMS, lambda case: case[0] in WAYS and FORM_OF[case[0]] == case[1:]),
)
each_shape_in_a_form = pytest.mark.parametrize(
    ("family", "dtype", "tied"),
    mostly(FAMILIES_IN_FORMS, lambda case: case[0] in SHAPES and FORM_OF[case[0]] == case[1:]),
)
each_of_few_in_a_form = pytest.mark.parametrize(
    ("family", "dtype", "tied"),
    mostly(FAMILIES_IN_FORMS, lambda case: case[0] in FEW and FORM_OF[case[0]] == case[1:]),
)
