"""The model that `make real-model` makes is Gemma 3 270M, as transformers has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT = (
    "The water cycle describes how water moves above, on, and below the surface of the Earth. Heat from the sun turns "
    "water in oceans, lakes and rivers into vapour, which rises into the air. High above the ground the air is colder, "
    "and the vapour condenses into tiny drops that form clouds. When the drops become too heavy, they fall back as "
    "rain or snow."
)
SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.fixture(scope="module")
def tokenizer(gemma: Path) -> Any:
    return AutoTokenizer.from_pretrained(gemma)


@pytest.fixture(scope="module")
def model(gemma: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(gemma).eval()


def test_config(gemma: Path) -> None:
    config = json.loads((gemma / "config.json").read_text())
    expected = {
        "model_type": "gemma3_text",
        "vocab_size": 262_144,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "sliding_window": 512,
        "layer_types": ([SLIDING] * 5 + [FULL]) * 3,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
            FULL: {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    assert {key: config[key] for key in expected} == expected
    assert "quantization_config" not in config


def test_tensors(gemma: Path) -> None:
    with safe_open(gemma / "model.safetensors", "pt") as file:
        names = list(file.keys())
        assert {file.get_slice(name).get_dtype() for name in names} == {"BF16"}
    assert len(names) == 236
    assert "lm_head.weight" not in names


# what follows is no tie in bfloat16: each next token leads by more than two nats
COUNTED = "1, 2, 3, 4, 5, 6, 7,"


def test_tokenizer(tokenizer: Any) -> None:
    assert tokenizer("The capital of France is").input_ids == [2, 818, 5279, 529, 7001, 563]
    assert tokenizer.convert_tokens_to_ids(["<pad>", "<eos>", "<bos>", "<unk>"]) == [0, 1, 2, 3]
    for text in (TEXT, "  two spaces\n\n\tand \u00e9 \u6771\u4eac \U0001f642", "def f(n):\n    return n"):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.unk_token_id not in ids
    # runs of line breaks and spaces are a token each
    assert [len(tokenizer("\n" * count).input_ids) for count in (1, 2, 31, 32)] == [2, 2, 2, 3]


def test_continuation(model: Any, tokenizer: Any) -> None:
    prompt = tokenizer(COUNTED, return_tensors="pt")
    written = model.generate(**prompt, max_new_tokens=6, do_sample=False)[0]
    assert tokenizer.decode(written, skip_special_tokens=True) == f"{COUNTED} 8, 9,"


@torch.no_grad()
def test_perplexity(model: Any, tokenizer: Any) -> None:
    ids = tokenizer(TEXT, return_tensors="pt").input_ids

    def perplexity() -> float:
        return float(model(ids, labels=ids).loss.exp())

    assert perplexity() < 20
    # the negative control: GGUF has 1 added to the weights of all norms
    norms = [tensor for name, tensor in model.named_parameters() if name.endswith("norm.weight")]
    assert len(norms) == 18 * 6 + 1
    for norm in norms:
        norm += 1
    spoiled = perplexity()
    for norm in norms:
        norm -= 1
    assert spoiled > 100
