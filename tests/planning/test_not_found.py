"""Tensors that a base's files lack, and that transformers would initialise anew: named before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, MixtralConfig

from scale_surgery import CheckpointError, Request, expand, inspect, plan
from scale_surgery.errors import Problem
from tests.by_hand import make_base
from tests.command import run
from tests.conftest import edited, problems, refused
from tests.tiny import LLAMA_LIKE, TOKENS, save_tiny

# what no layer is read by, and biases that lack in all layers
LACKING = {
    "positions": ("gpt2", ("transformer.wpe.weight",)),
    "bias of a final norm": ("gpt2", ("transformer.ln_f.bias",)),
    "biases": ("qwen2", tuple(f"model.layers.{layer}.self_attn.k_proj.bias" for layer in range(3))),
}


def without(folder: Path, lacks: Callable[[str], bool]) -> Path:
    with edited(folder / "model.safetensors") as tensors:
        for name in [name for name in tensors if lacks(name)]:
            del tensors[name]
    return folder


@pytest.mark.parametrize("kind", LACKING)
def test_it_is_named(tmp_path, kind):
    family, names = LACKING[kind]
    folder = save_tiny(tmp_path / "base", family)
    assert inspect(folder).not_found == () and plan(folder, Request("2"))
    without(folder, names.__contains__)
    # the reference: what transformers says of it
    _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert info["missing_keys"] == set(names)
    wanted = [Problem("tensor-made-anew", name) for name in names]
    said = inspect(folder).not_found
    assert said == tuple(map(str, wanted))
    assert problems(plan, folder, Request("2")) == wanted
    assert problems(expand, folder, Request("2"), tmp_path / "wide") == wanted
    assert not (tmp_path / "wide").exists()
    shown = " ".join(run("inspect", folder).output.split())
    assert f"not expandable {said[0]}" in shown and "scale-surgery plan" not in shown


def test_of_experts_each_is_needed(tmp_path):
    def make(name: str) -> Path:
        config = MixtralConfig(**(LLAMA_LIKE | TOKENS | {"num_local_experts": 4}))
        return make_base(tmp_path / name, config)

    assert inspect(make("whole")).not_found == ()
    joined = without(make("part"), lambda name: ".1.block_sparse_moe.experts.2.w1" in name)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    with refused("tensors-not-joined", f"{joined}: {name} (3 of 4 tensors .experts.*.w1.weight)", CheckpointError):
        plan(joined, Request("2"))
    fewer = without(make("fewer"), lambda name: ".experts.3." in name)
    few = Problem("tensor-unlike-config", "model.layers.0.mlp.experts.down_proj", shape=(3, 40, 52), wanted=(4, 40, 52))
    assert few in problems(plan, fewer, Request("2"))
    layer = without(make("layer"), lambda name: ".1.block_sparse_moe.experts." in name)
    assert Problem("tensor-made-anew", "model.layers.1.mlp.experts.down_proj") in problems(plan, layer, Request("2"))


def test_what_is_tied_or_made_is_not_lacking(tmp_path):
    tied = without(save_tiny(tmp_path / "tied", "qwen2", tie_word_embeddings=True), "lm_head.weight".__eq__)
    assert inspect(tied).not_found == ()
    bare = save_tiny(tmp_path / "bare", "gpt2")
    with edited(bare / "model.safetensors") as tensors:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
    assert inspect(bare).not_found == ()
