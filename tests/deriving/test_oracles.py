"""What is derived equals what was written by hand, for ten families."""

from __future__ import annotations

import pytest
from transformers import CONFIG_MAPPING, PreTrainedConfig

from scale_surgery.deriving.derive import Derived, derive
from tests.each import FEW, each_shape, mostly
from tests.families import FAMILIES, Family, read_sizes
from tests.tiny import tiny_config

# written by hand, and read by no forward of the stock class
UNREAD = {"gpt2": {"num_heads"}}


@pytest.fixture(scope="module", params=mostly(FAMILIES, FEW.__contains__))
def oracle(request) -> tuple[Family, PreTrainedConfig, Derived]:
    config = tiny_config(request.param)
    return FAMILIES[request.param], config, derive(config)


def test_linears_and_their_widths(oracle):
    family, config, facts = oracle
    (kind,), sizes = facts.architecture.kinds, read_sizes(family, config.to_dict())
    assert facts.sizes == sizes
    assert facts.architecture.is_uniform and [block.group for block in kind.blocks] == ["attn", "ffn"]
    query, key_value = sizes.query_heads * sizes.head_size, sizes.key_value_heads * sizes.head_size
    widths = {"residual": sizes.hidden, "query": query, "key_value": key_value, "inner": sizes.inner}
    assert [
        (linear.name, linear.roles, linear.fused_by, linear.inputs, list(linear.outputs)) for linear in kind.linears
    ] == [
        (
            linear.name,
            linear.roles,
            linear.fused_by,
            widths[linear.reads],
            [widths[stream] for stream in linear.writes()],
        )
        for linear in family.linears
    ]
    for block in kind.blocks:
        assert {name.rpartition(".")[0] for name in block.mute} == {block.linears[-1].name}


def test_norms_attention_and_activation(oracle):
    family, _, facts = oracle
    (kind,), style = facts.architecture.kinds, family.norm_style
    assert [(norm.name, norm.style) for norm in kind.pre_norms] == [(name, style) for name in family.pre_norms]
    assert [(norm.name, norm.style) for norm in kind.post_norms] == [(name, style) for name in family.post_norms]
    attention, mlp = kind.blocks
    assert [(norm.name, norm.stream, norm.head_axis, norm.style) for norm in attention.inner_norms] == [
        (norm.name, norm.stream, norm.head_axis, style) for norm in family.inner_norms
    ]
    assert (attention.name, mlp.activations) == (family.attention, (family.activation,))
    unread = UNREAD.get(family.model_type, ())
    assert attention.attributes == {k: v for k, v in family.attention_attributes.items() if k not in unread}
    assert attention.config == family.attention_config


def test_around_the_layers_and_config(oracle):
    family, config, facts = oracle
    about = facts.architecture
    assert (about.base_model, about.layers, about.embedding) == (family.base_model, family.layers, family.embedding)
    assert (about.final_norm.name, about.final_norm.style) == (family.final_norm, family.norm_style)
    assert about.padded == ((family.position_embedding,) if family.position_embedding else ())
    assert (about.first_norms, about.enters, about.transposed) == ((), "embedding", family.transposed)
    # transformers 5 renamed GPT-NeoX's head
    assert about.head == {"embed_out": "lm_head"}.get(family.head, family.head)
    assert (about.softcap, about.config_class) == (family.softcap, type(config).__name__)
    assert about.classes["AutoModel"] == type(config).__name__.replace("Config", "Model")
    assert bool(about.fixed_heads) == bool(family.fixed_heads)
    assert about.heads_divide_hidden == family.heads_divide_hidden
    known = {name: family.key(name) for name in about.keys}
    assert about.keys == known and {"hidden", "layers", "query_heads", "vocabulary"} <= set(known)


@each_shape
def test_default_config_gives_the_same(family):
    tiny, default = (derive(config).architecture for config in (tiny_config(family), CONFIG_MAPPING[family]()))
    names = [[(linear.name, linear.roles) for linear in about.kinds[0].linears] for about in (tiny, default)]
    assert names[0] == names[1]
