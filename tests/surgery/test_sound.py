"""Models that hear or see, which transformers knows as language models alone: sound and images work as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from scale_surgery import Request, expand, plan, strip, verify
from tests.by_hand import make_base
from tests.conftest import digests
from tests.tiny import save_tiny

AUDIO, IMAGE, ROWS = 95, 94, 9
LANGUAGE = {
    "vocab_size": 97,
    "hidden_size": 40,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}


def hearing() -> Any:
    """The smallest model that hears half a minute."""
    tower = {**TOWER, "num_mel_bins": 8, "num_hidden_layers": 1, "max_source_positions": 1500}
    language = {"model_type": "qwen3", "head_dim": 10, **LANGUAGE}
    sizes = {"audio_token_id": AUDIO, "audio_chunk_size": 480_000, "audio_merge_size": 4}
    return transformers.MossTranscribeDiarizeConfig(audio_config=tower, text_config=language, **sizes)


def seeing() -> Any:
    """A model whose module that takes in images lies beside its layers, in one config with them."""
    crop = {"image_size": 28, "patch_size": 14, "crop_size": 28, "image_token_id": IMAGE}
    towers = {
        "vision_config": {**TOWER, **crop, "num_hidden_layers": 2},
        "audio_config": {**TOWER, "num_blocks": 2, "input_size": 8, "nemo_conv_channels": 8, "audio_token_id": AUDIO},
    }
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return transformers.Phi4MultimodalConfig(**LANGUAGE, **towers, **tokens)


def prompt(token: int, count: int) -> torch.Tensor:
    """Words around a place for sound or an image."""
    words = torch.randint(5, 90, (1, ROWS), generator=torch.Generator().manual_seed(1))
    return torch.cat([words, torch.full((1, count), token), words], dim=1)


def sound() -> tuple[str, dict[str, torch.Tensor]]:
    """A prompt with sound: 24 of its 3000 frames are heard."""
    frames = torch.randn(1, 8, 3000, generator=torch.Generator().manual_seed(2))
    given = {"input_ids": prompt(AUDIO, 3), "input_features": frames, "padding_mask": torch.ones(1, 480_000).long()}
    return "input_features", given | {"input_features_mask": (torch.arange(3000) < 24).long()[None]}


def image() -> tuple[str, dict[str, torch.Tensor]]:
    """A prompt with an image of one crop."""
    pixels = torch.randn(1, 2, 3, 28, 28, generator=torch.Generator().manual_seed(2))
    given = {"input_ids": prompt(IMAGE, 5), "image_pixel_values": pixels, "image_sizes": torch.tensor([[28, 28]])}
    return "image_pixel_values", given | {"image_attention_mask": torch.ones(1, 2, 2, 2)}


def load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True).eval()


@torch.no_grad()
def logits(model: Any, **given: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = model(**given).logits
    return made


@pytest.mark.parametrize(("config", "given"), [(hearing, sound), pytest.param(seeing, image, marks=pytest.mark.slow)])
def test_with_sound_or_an_image_and_without(tmp_path: Path, config: Any, given: Any) -> None:
    base = make_base(tmp_path / "base", config())
    # with the first layer: its up stream would begin in the embedding
    made = expand(base, Request("all", variant="adapt", collaborate="both"), tmp_path / "wide").path
    stock, model, (name, asked) = load(base), load(made), given()
    seen = logits(stock, **asked)
    assert torch.equal(logits(model, **asked), seen)
    text = {"input_ids": prompt(7, 1)}
    assert torch.equal(logits(model, **text), logits(stock, **text))
    # the controls: the features count, and so do the new blocks
    assert not torch.equal(logits(stock, **asked | {name: asked[name] + 1}), seen)
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if weight_name.endswith(".w12"):
                weight.fill_(0.01)
    assert not torch.equal(logits(model, **asked), seen)
    with model.expansion_disabled():
        assert torch.equal(logits(model, **asked), seen)
    assert verify(made, base).passed
    assert digests(strip(made, tmp_path / "again").path) == digests(base)


def test_the_up_stream_of_a_model_that_only_reads_begins_in_the_embedding(tmp_path: Path) -> None:
    """The control: a part that a text does not run makes the difference."""
    reading = plan(save_tiny(tmp_path / "reading", "qwen3"), Request("all"))
    assert reading.architecture.enters == "embedding"
    assert plan(make_base(tmp_path / "hearing", hearing()), Request("all")).architecture.enters == "hook"
