"""Experts that are stored in MXFP4, as those of gpt-oss, stay as they are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig

from scale_surgery import Request, expand, extract, load_expansion, strip, verify
from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.errors import CheckpointError, PlanError, Problem
from tests.conftest import digests, edited, problems, shake

HIDDEN, INNER, EXPERTS, LAYERS = 64, 96, 4, 3
GROUP = 32  # values that share a scale
QUANTISED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


@pytest.fixture
def base(tmp_path) -> Path:
    """A tiny gpt-oss: experts as nibbles with a scale for each 32 of them, all else in bfloat16."""
    config = GptOssConfig(
        vocab_size=131,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    torch.manual_seed(0)
    folder = tmp_path / "base"
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    generator = torch.Generator().manual_seed(1)
    with edited(folder / "model.safetensors") as tensors, edited(folder / "config.json") as settings:
        settings["quantization_config"] = QUANTISED
        for layer in range(LAYERS):
            path = f"model.layers.{layer}.mlp.experts."
            for name, rows, columns in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
                del tensors[f"{path}{name}"]
                blocks, scales = (EXPERTS, rows, columns // GROUP, GROUP // 2), (EXPERTS, rows, columns // GROUP)
                tensors[f"{path}{name}_blocks"] = torch.randint(0, 256, blocks, generator=generator).byte()
                tensors[f"{path}{name}_scales"] = torch.randint(115, 120, scales, generator=generator).byte()
    return folder


def logits(model: Any) -> torch.Tensor:
    """Logits of a folder, or of a model in memory."""
    if isinstance(model, Path):
        model = AutoModelForCausalLM.from_pretrained(model, trust_remote_code=True)
    ids = torch.randint(3, 100, (2, 11), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        output: torch.Tensor = model.eval()(ids).logits
    return output


def test_they_stay_as_they_are_stored(base, tmp_path):
    made = expand(base, Request("1-2", variant="adapt", collaborate="both"), tmp_path / "expanded")
    stored = {info.dtype for info in open_checkpoint(made.path).tensors.values()}
    assert stored == {"U8", "BF16"}
    assert {tensor.dtype for tensor in made.plan.tensors} == {"BF16"}
    assert torch.equal(logits(made.path), logits(base))
    assert verify(made.path, base).passed
    assert digests(strip(made.path, tmp_path / "stripped").path) == digests(base)


def test_a_layer_with_nibbles_has_no_copy(base, tmp_path):
    """A copy in another dtype would be read as other numbers, and not as zeros."""
    (found,) = problems(expand, base, Request("1", method="depth"), tmp_path / "deep", error=PlanError)
    assert found.code == "copies-not-floats"
    names = [f"model.layers.1.mlp.experts.{part}" for part in ("down_proj_blocks", "gate_up_proj_scales")]
    assert set(names) <= set(found.values["tensors"]) and not (tmp_path / "deep").exists()


def test_a_changed_nibble_is_noticed(base, tmp_path):
    made = expand(base, Request("1", variant="preserve"), tmp_path / "expanded")
    shard = next(made.path.glob("model-*.safetensors"))
    with edited(shard) as tensors:
        tensors["model.layers.0.mlp.experts.down_proj_blocks"][0, 0, 0, 0] ^= 1
    verification = verify(made.path, probes=None)
    evidence = [promise.evidence for promise in verification.promises if promise.holds is False]
    assert not verification.passed and any("2 problems" in line for line in evidence), "the shard and the tensor"


@pytest.mark.slow
def test_an_expansion_goes_onto_them_in_memory(base, tmp_path):
    """Where a loaded model was dequantised its files are what can be compared."""
    made = expand(base, Request("1-2", variant="adapt", collaborate="both"), tmp_path / "expanded")
    extracted = extract(shake(made.path), tmp_path / "extract").path
    expected = logits(made.path)
    assert torch.equal(logits(load_expansion(base, extracted)), expected)
    model = AutoModelForCausalLM.from_pretrained(base)
    names = [f"model.layers.{layer}.mlp.experts.{part}_proj" for layer in range(3) for part in ("gate_up", "down")]
    assert problems(load_expansion, model, extracted) == [
        Problem("base-dequantised", "model", tensors=names, base="base")
    ]
    assert torch.equal(logits(load_expansion(model, extracted, check=False)), expected)
    with edited(base / "model.safetensors") as tensors:
        tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 0, 0] += 1
    (problem,) = problems(load_expansion, base, extracted, error=CheckpointError)
    assert problem.code == "base-differs-load"
    assert problem.details == (Problem("base-tensor-bytes", "model.layers.1.mlp.experts.down_proj_scales"),)
