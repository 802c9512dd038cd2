"""Treatments that are derived for a spread of types, from configs such as users have them."""

from __future__ import annotations

import pytest
from transformers import CONFIG_MAPPING, PreTrainedConfig

from scale_surgery.deriving.derive import derive
from scale_surgery.errors import Problem, UnsupportedFamilyError
from scale_surgery.planning.architecture import STREAMS, Architecture
from scale_surgery.planning.paths import path_problems
from tests.conftest import problems
from tests.deriving.configs import OPTIONS
from tests.each import mostly

# type -> for each kind of layer the treatments of its blocks, in the order in which they run
# beside those that tests/sweep takes the whole way
EXPECTED = {
    "llama": ["split split"],
    "gemma3_text": ["split split"],
    "gemma4_text": ["split split edges", "split split edges"],
    "granitemoehybrid": ["edges block split", "split block split"],
    "gptj": ["edges split"],
    "stablelm": ["split split"],
    "starcoder2": ["split split"],
    "qwen3_next": ["edges block", "split block"],
    "dbrx": ["split block"],
    "nemotron_h": ["edges", "block", "split", "split"],
    # features that a block transposed, in bfloat16, beside a bias
    "recurrent_gemma": ["edges split", "split split"],
}
REFUSED = {
    "minimax": Problem("residual-of-norm", "model.layers.0 (MiniMaxDecoderLayer)", norm="post_attention_layernorm"),
    "openai-gpt": Problem("output-of-norm", "transformer.h.0 (Block)", norm="ln_2"),
    "bert": Problem("output-of-norm", "bert.encoder.layer.0 (BertLayer)", norm="output.LayerNorm"),
    "modernbert-decoder": Problem("head-off-norm", "decoder", norm="model.final_norm"),
    "deepseek_v4": Problem("streams-several", "model.layers.0 (DeepseekV4DecoderLayer)"),
}


def config_of(model_type: str) -> PreTrainedConfig:
    return CONFIG_MAPPING[model_type](**OPTIONS.get(model_type, {}))


def architecture(model_type: str) -> Architecture:
    return derive(config_of(model_type)).architecture


# state spaces beside attention, and images: the rarest are proved by test-slow
COMMON = ("llama", "gemma3_text", "dbrx")
each_type = pytest.mark.parametrize("model_type", mostly(EXPECTED, COMMON.__contains__))


@each_type
def test_treatments(model_type):
    treatments = [" ".join(block.treatment for block in kind.blocks) for kind in architecture(model_type).kinds]
    assert treatments == EXPECTED[model_type]
    about, sizes = architecture(model_type), derive(config_of(model_type)).sizes
    for block in (block for kind in about.kinds for block in kind.blocks):
        assert block.mute and bool(block.reason) == (block.treatment != "split")
        assert bool(block.linears) == (block.treatment != "block")
        for linear in block.linears:
            reads, writes = STREAMS[linear.roles[0]]
            assert len(linear.roles) == len(linear.outputs)
            assert linear.inputs == sizes.hidden or reads != "residual"
            assert linear.outputs == (sizes.hidden,) or writes != "residual"
    assert set(about.kind_of_layer) == set(range(len(about.kinds)))
    heads, types = [kind.blocks[0].head_size for kind in about.kinds], set(about.layer_types)
    if model_type == "gemma4_text":
        assert heads == [256, 512], "layers of other widths are other kinds"
    if model_type in ("gemma3_text", "llama"):
        assert types == ({"sliding_attention", "full_attention"} if model_type == "gemma3_text" else set())


@pytest.mark.parametrize("model_type", mostly(REFUSED, ("bert", "minimax").__contains__))
def test_what_cannot_be_expanded_is_named(model_type):
    assert problems(architecture, model_type, error=UnsupportedFamilyError) == [REFUSED[model_type]]


def test_a_layer_that_multiplies_its_input_is_refused():
    (problem,) = problems(architecture, "beam", error=UnsupportedFamilyError)
    assert (problem.code, problem.where) == ("stream-multiplied", "model.layers.0 (BeamDecoderLayer)")
    assert problem.values["factor"] == pytest.approx(3**-0.5, rel=1e-3)


@pytest.mark.parametrize(
    ("heads", "groups"), mostly([(32, 8), (32, 1), (32, 32), (28, 4)], lambda pair: pair == (28, 4))
)
def test_groups_of_heads_are_those_of_the_model(heads, groups):
    config = CONFIG_MAPPING["llama"](hidden_size=heads * 64, num_attention_heads=heads, num_key_value_heads=groups)
    facts = derive(config)
    assert (facts.sizes.query_heads, facts.sizes.key_value_heads, facts.sizes.head_size) == (heads, groups, 64)
    twin = facts.twins[0]
    assert (twin["num_attention_heads"] == twin["num_key_value_heads"]) == (heads == groups)
    assert (twin["num_key_value_heads"] == 1) == (groups == 1)


@pytest.mark.slow
def test_vision_language_models_begin_by_a_hook():
    about = architecture("gemma3")
    assert about.enters == "hook" and about.base_model == "model.language_model"
    assert about.classes["AutoModelForImageTextToText"] == "Gemma3ForConditionalGeneration"
    assert about.kinds == architecture("gemma3_text").kinds


@pytest.mark.slow
def test_what_binds_a_model_to_its_form_is_told():
    """Logits that are scaled after the head have no router."""
    assert architecture("cohere").alters_logits
    assert path_problems(architecture("cohere"), None) == [Problem("logits-changed-later", "cohere")]
    assert not path_problems(architecture("llama"), None)
    plain = architecture("llama"), architecture("gemma2")
    assert not any(about.alters_logits or about.keeps_batch for about in plain)


@pytest.mark.slow
def test_a_mixer_of_states_is_as_wide_as_its_own_heads():
    """And not as those of attention, though they are as many features here."""
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "mamba_d_ssm": 256}
    config = CONFIG_MAPPING["falcon_h1"](**sizes, mamba_n_heads=16, mamba_d_head=16, mamba_d_state=16)
    twin = derive(config).twins[0]
    assert twin["mamba_d_ssm"] == twin["mamba_n_heads"] * twin["mamba_d_head"]


@pytest.mark.slow
def test_norms_whose_size_follows_from_the_number_of_heads_have_no_stock_form_with_more():
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 3}
    plain, normed = (
        derive(CONFIG_MAPPING["phi"](**sizes, qk_layernorm=is_normed)).architecture for is_normed in (False, True)
    )
    assert plain.fixed_heads == ""
    assert normed.fixed_heads.startswith("with more heads self_attn.q_layernorm.weight, ")


def test_a_model_without_room_for_two_paths_is_not_routed():
    """GPTBigCode lays what its last norm gives into the shape of its input; its blocks alone would take two paths."""
    config = CONFIG_MAPPING["gpt_bigcode"](multi_query=False, n_embd=256, n_head=4, n_layer=3)
    about = derive(config).architecture
    assert about.is_uniform and about.keeps_batch
    assert path_problems(about, 0) == [Problem("batch-kept", "gpt_bigcode")]
    assert not path_problems(about, None)
