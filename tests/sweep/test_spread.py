"""A spread of model types goes the whole way; `make test-families` takes all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from scale_surgery import Request, expand, route_export
from scale_surgery.deriving.derive import derive
from scale_surgery.errors import Problem
from tests.conftest import edited, load, shake
from tests.each import mostly
from tests.routed import random_ids
from tests.sweep.reader import Reader
from tests.sweep.take import blocks_of, default_config, take_through, twin_config, write_base

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
    "lfm2": ("split", "edges"),
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


# the default run takes a type of each treatment the whole way, and proves facts of a few others on their twins
WHOLE = {"gpt_oss"}
PROVED = {"falcon", "gpt_oss", "mixtral", "phi"}
REASONS = {
    "deepseek_v3": "keys and values are made from a latent: self_attn.kv_b_proj reads what another linear wrote",
    "gpt_oss": "it has parameters of its own: sinks",
    "mamba2": "it does not hand queries, keys and values to transformers' attention interface",
    "bloom": "it does not hand queries, keys and values to transformers' attention interface",
}


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.close()


def treatments(blocks):
    return tuple(" ".join(dict.fromkeys(block.split()[0] for block in blocks[group])) for group in ("attn", "ffn"))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", mostly(SPREAD, WHOLE.__contains__))
def test_a_type_goes_the_whole_way(reader, model_type):
    row = take_through(model_type, reader, beside=False)
    assert not row.broken
    assert treatments(row.blocks) == SPREAD[model_type]


@pytest.mark.parametrize("model_type", mostly(SPREAD, PROVED.__contains__))
def test_facts_about_a_type_are_proved_on_its_twin(model_type):
    derived = derive(default_config(model_type))
    assert treatments(blocks_of(derived)) == SPREAD[model_type]
    if model_type in REASONS:
        assert derived.architecture.kinds[0].blocks[0].reason == REASONS[model_type]


@torch.no_grad()
def test_queries_and_keys_that_pass_through_one_norm_are_routed(tmp_path):
    """Of Llama 4: as many query heads as the norm is told of key heads would be too few."""
    base = write_base(twin_config("llama4_text"), torch.float32, tmp_path / "base")
    wide = shake(expand(base, Request("last:2", variant="adapt", collaborate="both"), tmp_path / "wide").path)
    routed, ids = load(route_export(wide, tmp_path / "routed").path), random_ids(2, 9)
    paths = routed.path_logits(ids)
    assert torch.equal(paths[0], load(base)(ids).logits) and torch.equal(paths[1], load(wide)(ids).logits)
    assert not torch.equal(*paths), "the control: the paths differ"
    # side by side they are the same
    sides = routed.score_tokens(ids).sides
    for side, logits in zip(sides.unbind(-1), paths, strict=True):
        alone = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
        torch.testing.assert_close(side, alone, atol=1e-5, rtol=1e-5)


def test_kinds_of_layers_follow_the_real_depth():
    config = default_config("deepseek_v3")
    about = derive(config).architecture
    assert about.kind_of_layer == (0,) * 3 + (1,) * 58
    assert about.kinds[0].blocks[1].inner == config.intermediate_size


@pytest.mark.slow
def test_what_breaks_is_said(reader, monkeypatch):
    """The check itself: W12 that is not zero writes into the base stream."""

    def spoiled(*args, **options):
        made = expand(*args, **options)
        for shard in made.plan.shards:
            with edited(made.path / shard) as tensors:
                tensors |= {name: tensor + 1 for name, tensor in tensors.items() if name.endswith(".w12")}
        return made

    monkeypatch.setattr("tests.sweep.take.expand", spoiled)
    assert "logits are not those of the base" in take_through("llama", reader, beside=False).broken


def test_what_is_not_supported_is_said():
    reason = take_through("doge", None, beside=False).broken  # nothing is written that somebody could read
    parameters = ["input_residual", "post_attention_residual"]
    problem = Problem("stream-scaled", "model.layers.0 (DogeDecoderLayer)", parameters=parameters)
    assert reason == f"UnsupportedFamilyError: {problem}"
