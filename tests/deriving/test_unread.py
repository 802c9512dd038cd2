"""What stock classes pass over in old files is known by name, and hides nothing that a model has."""

from __future__ import annotations

import re

import pytest
from transformers import CONFIG_MAPPING

from scale_surgery.deriving.derive import derive, read_real
from tests.tiny import tiny_config

OLD = {
    "gpt2": ["transformer.h.0.attn.bias"],
    "gpt_neox": ["gpt_neox.layers.1.attention.bias", "gpt_neox.layers.1.attention.masked_bias"],
    "llama": ["model.layers.2.self_attn.rotary_emb.inv_freq"],
}
NEW = {
    "gpt2": ["transformer.h.0.attn.c_attn.bias", "transformer.h.0.attn.c_proj.bias"],
    "gpt_neox": ["gpt_neox.layers.1.attention.dense.bias", "gpt_neox.layers.1.attention.query_key_value.bias"],
    "llama": ["model.layers.2.self_attn.q_proj.bias"],
}


def passed_over(patterns: tuple[str, ...], names: list[str]) -> list[str]:
    return [name for name in names if any(re.search(pattern, name) for pattern in patterns)]


@pytest.mark.parametrize("family", OLD)
def test_masks_and_frequencies_of_old_files(family):
    patterns = derive(tiny_config(family)).architecture.unread
    assert passed_over(patterns, OLD[family]) == OLD[family]
    assert passed_over(patterns, NEW[family]) == []


def test_a_layer_that_a_class_passes_over_in_other_checkpoints_is_read():
    """GLM 4.5 Air has 46 layers and one to predict with, which has the number of a layer of the large GLM 4.5."""
    layers = {"num_hidden_layers": 48, "first_k_dense_replace": 1}
    config = CONFIG_MAPPING["glm4_moe"](**layers)
    names = list(read_real(config).model.state_dict())
    assert any(name.startswith("model.layers.46.") for name in names)
    assert passed_over(derive(config).architecture.unread, names) == []
    # the negative control: what the class itself says would hide that layer
    ignored = tuple(read_real(config).model._keys_to_ignore_on_load_unexpected)
    assert passed_over(ignored, names)
