"""What measures a model generates by settings of its own, whatever its generation_config.json says."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from scale_surgery import GenerationSettings, Request, expand, generate, merge, verify
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.running.own_generation import continue_greedily, generate_with
from tests.conftest import edited
from tests.each import mostly

NEW = 6
# each changes what `generate` gives, or what it needs
SETTINGS: dict[str, dict[str, Any]] = {
    "an object": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    "stop strings": {"stop_strings": ["a"]},
    "several sequences": {"do_sample": True, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "temperature": 5.0, "top_k": 0},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "early exit": {"assistant_early_exit": 1},
    "beams": {"num_beams": 3, "num_return_sequences": 3, "early_stopping": True, "length_penalty": 0.1},
    "length": {"max_length": 4},
    "fewest tokens": {"min_new_tokens": NEW + 3, "min_length": 60},
    "most tokens": {"max_new_tokens": 2},
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "forced tokens": {"forced_bos_token_id": 7, "forced_eos_token_id": 8},
    "guidance": {"guidance_scale": 3.0},
    "watermark": {"watermarking_config": {"bias": 20.0}},
    "penalties": {"repetition_penalty": 9.0, "no_repeat_ngram_size": 1, "encoder_repetition_penalty": 3.0},
    "bias": {"sequence_bias": [[[9], 1e4]]},
    "bad words": {"bad_words_ids": [[number] for number in range(3, 90)]},
    "suppressed": {"suppress_tokens": list(range(3, 90)), "begin_suppress_tokens": [91]},
    "constraints": {"force_words_ids": [[5]]},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "time": {"max_time": 0.0},
    "chunks": {"prefill_chunk_size": 2},
    "healing": {"token_healing": True},
    "states": {"return_dict_in_generate": True, "output_attentions": True, "output_hidden_states": True},
    "ends": {"eos_token_id": list(range(3, 60)), "pad_token_id": 96},
}


@pytest.fixture(scope="module")
def model(base_of: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(base_of("llama")).eval()


@pytest.fixture
def inputs() -> Mapping[str, torch.Tensor]:
    ids = torch.randint(3, 97, (2, 7), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def given(settings: Mapping[str, Any], folder: Path) -> GenerationConfig:
    """As transformers reads it from a folder."""
    with edited(folder / "generation_config.json") as content:
        content.update(settings)
    return GenerationConfig.from_pretrained(folder)


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "ends"])
def test_nothing_of_the_model_s_own_settings_leaks_in(model, inputs, tmp_path, monkeypatch, name):
    monkeypatch.setattr(model, "generation_config", GenerationConfig(eos_token_id=2))
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    greedy, plain = continue_greedily(model, inputs, NEW), generate_with(model, inputs, **settings)
    own = given({**SETTINGS[name], "eos_token_id": 2}, tmp_path)
    monkeypatch.setattr(model, "generation_config", own)
    assert torch.equal(continue_greedily(model, inputs, NEW), greedy)
    assert torch.equal(generate_with(model, inputs, **settings), plain)
    assert model.generation_config is own
    assert greedy.shape == (2, 7 + NEW)


@pytest.mark.parametrize(
    "name", ["an object", "stop strings", "several sequences", "forced tokens", "bias", "most tokens"]
)
def test_the_control_leaks(model, inputs, tmp_path, monkeypatch, name):
    greedy = continue_greedily(model, inputs, NEW)
    monkeypatch.setattr(model, "generation_config", given(SETTINGS[name], tmp_path))
    try:
        made = model.generate(**inputs, **({"max_new_tokens": NEW} if name != "most tokens" else {}), do_sample=False)
    except ValueError as error:
        assert "stop strings" in str(error) or "num_return_sequences" in str(error)
    else:
        assert not isinstance(made, torch.Tensor) or not torch.equal(made, greedy)


def test_no_token_ends_a_text_or_is_new(model, inputs, tmp_path, monkeypatch):
    plain = continue_greedily(model, inputs, NEW)[:, 7:]
    first = plain[0, 0].item()
    monkeypatch.setattr(model, "generation_config", GenerationConfig(eos_token_id=[first, 2]))
    assert first not in continue_greedily(model, inputs, NEW)[:, 7:]
    # the control
    assert model.generate(**inputs, max_new_tokens=NEW, do_sample=False, pad_token_id=0)[0, 7] == first
    monkeypatch.setattr(model, "generation_config", GenerationConfig())
    known = int(plain.max())
    assert continue_greedily(model, inputs, NEW, known=known)[:, 7:].max() < known


WORST = {
    "return_dict_in_generate": True,
    "num_beams": 2,
    "num_return_sequences": 2,
    "stop_strings": ["a", " "],
    "min_new_tokens": 3,
    "repetition_penalty": 1.4,
}


@pytest.mark.parametrize("file", mostly(["generation_config.json", "config.json"], "config.json".__ne__))
def test_every_command_runs_with_settings_that_transformers_takes(tmp_path: Path, file: str) -> None:
    base = Path(shutil.copytree(SHIPPED_MODEL, tmp_path / "base"))
    (base / "generation_config.json").unlink()
    with edited(base / file) as content:
        content.update(WORST if file != "config.json" else {**WORST, "stop_strings": None, "do_sample": True})
    wide = expand(base, Request("last:1", variant="adapt"), tmp_path / "wide").path
    result = verify(wide)
    assert result.passed and result.numbers is not None and result.numbers.generation_equal
    merged = merge(wide, tmp_path / "fused", to="fused")
    assert merged.drift is not None and merged.drift.holds and merged.drift.generation_agreement == 1.0
    asked = generate(wide, "Who is", GenerationSettings(max_new_tokens=8))
    assert asked.answers[0].tokens
    if file != "config.json":
        # the model's own settings count for answers: a space is a text to stop at
        assert len(asked.answers[0].tokens) < 8
