"""A spread of model types goes the whole way; `make test-families` takes all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sweep.reader import Reader
from tests.sweep.take import take_through

# a type for each way of being made: experts, latents, sinks, state spaces, positions, biases, parallel and scaled parts
SPREAD = {
    "apertus": ("split", "split"),
    "bloom": ("edges", "split"),
    "cohere2": ("split", "split"),
    "deepseek_v3": ("edges", "split block"),
    "falcon": ("edges", "split"),
    "falcon_h1": ("edges split", "split"),
    "glm4": ("split", "split"),
    "gpt_oss": ("edges", "block"),
    "granite": ("split", "split"),
    "lfm2": ("edges split", "edges"),
    "mamba2": ("edges", ""),
    "minicpm3": ("edges", "split"),
    "mixtral": ("split", "block"),
    "mpt": ("edges", "split"),
    "nemotron": ("split", "split"),
    "olmo3": ("split", "split"),
    "opt": ("split", "split"),
    "phi": ("split", "split"),
    "qwen3_moe": ("split", "block"),
    "smollm3": ("split", "split"),
}


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.close()


@pytest.mark.parametrize("model_type", SPREAD)
def test_a_type_goes_the_whole_way(reader, model_type):
    row = take_through(model_type, reader, beside=False)
    assert not row.broken
    found = tuple(" ".join(dict.fromkeys(one.split()[0] for one in row.blocks[group])) for group in ("attn", "ffn"))
    assert found == SPREAD[model_type]


def test_what_breaks_is_said(reader, monkeypatch):
    """The check itself: an expansion that begins with other than zeros is none that leaves the base as it was."""
    monkeypatch.setattr("scale_surgery.planning.plan._init", lambda *_, **__: "random")
    assert "logits are not those of the base" in take_through("llama", reader, beside=False).broken


def test_what_is_not_supported_is_said(reader):
    assert "UnsupportedFamilyError" in take_through("doge", reader, beside=False).broken
