"""Twins keep what matters and nothing else, and two of them unmask what is true by chance."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import CONFIG_MAPPING, LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from scale_surgery.deriving.build import build_twin, token_ids
from scale_surgery.deriving.derive import derive, find_twins, read_real
from scale_surgery.deriving.facts import agree, number_kind, watch_twin
from scale_surgery.deriving.fallback import hooked, weaker, weaker_block
from scale_surgery.deriving.shrink import shrink
from scale_surgery.deriving.watch import attention_noted, is_combination
from scale_surgery.errors import Problem, UnsupportedFamilyError
from scale_surgery.planning.architecture import Linear, numberless
from tests.conftest import problems, refused
from tests.each import mostly

LLAMA = LlamaConfig(
    hidden_size=4096,
    num_key_value_heads=8,
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
)


def test_twins_keep_rope_and_heads_and_no_two_sizes():
    facts = derive(LLAMA)
    first, second = twins = facts.twins
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    assert not {first[name] for name in names} & {second[name] for name in names}
    assert len({first[name] for name in names}) == len(names)
    assert derive(LlamaConfig(**LLAMA.to_dict())) is facts, "asked twice it answers at once"
    assert derive(LlamaConfig(**LLAMA.to_dict() | {"num_hidden_layers": 4})) is not facts
    assert all(twin["rope_parameters"] == LLAMA.to_dict()["rope_parameters"] for twin in twins)
    assert all(twin["head_dim"] == 128 and twin["rms_norm_eps"] == LLAMA.rms_norm_eps for twin in twins)


def test_the_same_config_gives_the_same_twins():
    left, right = (shrink(read_real(LLAMA))[0] for _ in range(2))
    assert left.to_dict() == right.to_dict()
    first, second = (build_twin(config)(input_ids=token_ids(config)).logits for config in (left, right))
    assert torch.equal(first, second)


def test_equal_sizes_make_a_false_fact_that_a_second_twin_unmasks():
    """Where key/value heads are as many as query heads, an attribute of either fits; with fewer it is told apart."""
    config = CONFIG_MAPPING["phi3"]
    common = {"hidden_size": 64, "intermediate_size": 52, "num_hidden_layers": 1, "vocab_size": 131, "pad_token_id": 0}
    deceived = watch_twin(config(**common, num_attention_heads=4, num_key_value_heads=4), {0: 0}).layers[0].kind
    honest = watch_twin(config(**common, num_attention_heads=8, num_key_value_heads=2), {0: 0})
    spoiled = replace(deceived.blocks[0], attributes={"num_key_value_heads": "query_heads"})
    kind = replace(deceived, blocks=(spoiled, deceived.blocks[1]))
    layer = honest.model.model.layers[0]
    agreed = agree(kind, number_kind(kind, layer, 8), honest.layers[0].kind)
    # step by step to what does not need the fact: one fused projection by heads first
    assert agreed.blocks[0].linears[0].fused_by == "head" and kind.blocks[0].linears[0].fused_by == "section"
    assert agree(deceived, number_kind(deceived, layer, 8), honest.layers[0].kind) == deceived


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


SETTINGS = (
    torch.no_grad,
    torch.inference_mode,
    partial(torch.autocast, "cpu"),
    partial(torch.device, "meta"),
    partial(default_dtype, torch.bfloat16),
)


@pytest.mark.parametrize("number", mostly(range(len(SETTINGS)), (1, 4).__contains__))
def test_what_the_caller_set_for_torch_changes_no_fact(number):
    # a model of its own for each, since what is known already is not derived again
    settings = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 5 + number}
    config, state, functions = LlamaConfig(**settings), torch.get_rng_state(), dict(ALL_ATTENTION_FUNCTIONS)
    before = config.to_dict()
    with SETTINGS[number]():
        assert torch.is_grad_enabled() == (number > 1)
        facts = derive(config)
    assert torch.equal(torch.get_rng_state(), state) and config.to_dict() == before, "nothing of the caller's moved"
    with pytest.raises(RuntimeError), attention_noted():
        assert dict(ALL_ATTENTION_FUNCTIONS) != functions
        raise RuntimeError
    assert dict(ALL_ATTENTION_FUNCTIONS) == functions
    assert facts.architecture == replace(
        derive(LlamaConfig(**settings | {"num_hidden_layers": 4})).architecture, kind_of_layer=(0,) * (5 + number)
    )


def test_a_combination_is_found_and_another_is_not():
    first, second, third = torch.randn(3, 2, 7, 5)
    numbers = is_combination(first * 2 - second * 0.5, [first, second])
    assert numbers is not None and numbers == pytest.approx([2, -0.5], abs=1e-5)
    assert is_combination(first * second, [first, second]) is None and is_combination(third, [first, second]) is None


def test_what_mutes_a_block_mutes_it():
    """In a twin of DeepSeek, which has experts, shared experts and MLPs."""
    real = read_real(CONFIG_MAPPING["deepseek_v3"]())
    twin = watch_twin(shrink(real)[0], real.shown)
    kind = derive(real.config).architecture.kinds[1]
    part = twin.layers[3].parts[1]
    with torch.no_grad():
        assert bool(part.call.rerun(part.entry).any())
        for name, parameter in part.module.named_parameters():
            if numberless(f"mlp.{name}") in kind.blocks[1].mute:
                parameter.zero_()
        assert not bool(part.call.rerun(part.entry).any())
    assert kind.blocks[1].mute == ("mlp.experts.down_proj", "mlp.shared_experts.down_proj.weight")


def test_treatments_step_down():
    block = derive(CONFIG_MAPPING["phi3"]()).architecture.kinds[0].blocks[0]
    by_head = weaker_block(block)
    assert by_head is not None and by_head.linears[0].fused_by == "head" and by_head.treatment == "split"
    edges = weaker_block(by_head, "not proved")
    assert edges is not None and (edges.treatment, edges.reason) == ("edges", "not proved")
    assert edges.linears[0] == Linear("self_attn.qkv_proj", ("read",), 3072, (9216,))
    whole = weaker_block(edges)
    assert whole is not None and (whole.treatment, whole.linears) == ("block", ())
    assert weaker_block(whole) is None
    # an architecture steps down one class at a time
    about = derive(CONFIG_MAPPING["llama"]()).architecture
    weakened = weaker(about, "LlamaMLP")
    assert weakened is not None and [block.treatment for block in weakened.kinds[0].blocks] == ["split", "edges"]
    assert weaker(about, "NoSuchClass") is None
    hook = hooked(about)
    assert hook is not None and hook.enters == "hook" and hooked(hook) is None


# what is said of single layers, where each kind comes later than a few layers, and the twin that shows all of it
LATE: dict[str, tuple[str, dict[str, object], tuple[int, ...]]] = {
    "a period of six": ("gemma3_text", {}, (0, 1, 5)),
    "a number of first layers": ("deepseek_v3", {"first_k_dense_replace": 5}, (0, 1, 5)),
    "the same, so many that a twin of all would be slow": ("deepseek_v3", {"first_k_dense_replace": 30}, (0, 1, 30)),
    "the number of a last layer": ("ernie4_5_moe", {"moe_layer_start_index": 0, "moe_layer_end_index": 20}, (0, 1, 21)),
    "a number of last layers": ("gemma4_text", {"num_kv_shared_layers": 10}, (0, 1, 5, 17, 19, 20, 23)),
    "a list of types": ("qwen3_next", {"layer_types": (["linear_attention"] * 7 + ["full_attention"]) * 6}, (0, 1, 7)),
    "a list of numbers": ("lfm2", {"full_attn_idxs": [7, 10], "num_hidden_layers": 16}, (0, 1, 7)),
    "a list of layers without experts": ("qwen3_moe", {"mlp_only_layers": [20]}, (0, 1, 20)),
    "a few of attention among state spaces": ("bamba", {"attn_layer_indices": [9, 18, 27]}, (0, 1, 9)),
    # what layers are told, and not what they are made of
    "layers without rope": ("smollm3", {}, (0, 1, 2, 3)),
    "a list of numbers that are zero": ("granite_swa", {"layer_rope_theta": [1e4] * 9 + [0.0] * 15}, (0, 1, 2, 9, 12)),
}


@pytest.mark.parametrize("title", mostly(LATE, list(LATE)[::3].__contains__))
def test_a_kind_that_comes_late_is_shown(title):
    model_type, values, shown = LATE[title]
    real, *twins = find_twins(read_real(CONFIG_MAPPING[model_type](**values)))
    assert real.chosen == shown and set(real.kinds) <= set(shown)
    for config in twins:
        twin = read_real(config)
        assert [form.made_of for form in twin.forms] == [real.forms[layer].made_of for layer in shown]
        assert len({(twin_kind, kind) for twin_kind, kind in zip(twin.kinds, real.twin_kinds, strict=True)}) == len(
            set(twin.kinds)
        )
        assert set(real.shown) <= set(range(twin.place.count))


def test_layers_that_are_told_the_same_are_of_one_kind():
    kinds = [read_real(CONFIG_MAPPING[name]()).kinds for name in ("gpt_neo", "diffllama", "llama")]
    assert [set(numbers) for numbers in kinds] == [{0, 1}, {0}, {0}]


def test_a_layer_that_no_twin_shows_is_named(monkeypatch):
    real = read_real(CONFIG_MAPPING["llama"](num_hidden_layers=4))
    forms = [*real.forms[:2], real.forms[2]._replace(made_of=("another",)), real.forms[3]]
    late = Problem("twin-without-layer", layer=2)
    assert problems(shrink, replace(real, forms=forms)) == [
        Problem("twin-not-run", "config.json", late, model_type="llama")
    ]
    monkeypatch.setattr("scale_surgery.deriving.shrink.MOST_PARAMETERS", 1000)
    large = Problem("twin-too-large", layer=3, layers=4)
    assert problems(shrink, read_real(CONFIG_MAPPING["smollm3"]())) == [
        Problem("twin-not-run", "config.json", large, model_type="smollm3")
    ]


def test_layers_are_called_by_their_numbers_in_the_model():
    """The last layer of this model alone has a bias after attention, which is not in what its part gives."""
    with refused("output-no-sum", "gpt_neox_japanese.layers.31 (GPTNeoXJapaneseLayer)", UnsupportedFamilyError):
        derive(CONFIG_MAPPING["gpt_neox_japanese"]())
