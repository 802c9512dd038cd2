"""The context is read alike from config.json and from transformers' config, and one rule chooses the length."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig

from scale_surgery import DataError
from scale_surgery.errors import Problem
from scale_surgery.running.context import choose_length, context_of
from tests.conftest import problems


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gemma3_text"])
def test_the_file_and_the_config_say_the_same(base_of, family):
    path = base_of(family)
    assert context_of(json.loads((path / "config.json").read_text())) == 64
    assert context_of(AutoConfig.from_pretrained(path)) == 64


@pytest.mark.parametrize("config", [{}, {"max_position_embeddings": None}, {"n_positions": 0}])
def test_a_config_need_not_say_it(config):
    assert context_of(config) is None


@pytest.mark.parametrize(
    ("asked", "contexts", "length"),
    [
        (None, {}, 1024),
        (None, {"one": 2048, "two": None}, 1024),
        (None, {"one": 2048, "two": 512}, 512),
        (512, {"one": 2048, "two": 512}, 512),
        (4096, {"one": None}, 4096),
    ],
)
def test_the_length_is_what_was_asked_for_or_the_shortest_context(asked, contexts, length):
    assert choose_length(asked, contexts) == length


def test_a_length_that_does_not_fit():
    contexts = {"one": 64, "two": None, "three": 8, "four": 65}
    assert problems(choose_length, 65, contexts, error=DataError) == [
        Problem("length-over-context", "--sequence-length", length=65, context=64, model="one"),
        Problem("length-over-context", "--sequence-length", length=65, context=8, model="three"),
    ]
    assert problems(choose_length, 1, {"one": 64}, error=DataError) == [
        Problem("length-too-short", "--sequence-length", length=1)
    ]
