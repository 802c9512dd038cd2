"""Copies of layers are proved on a twin: those that would change what a model computes are refused, and no others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from scale_surgery import PlanError, Request, RunOptions, expand, plan
from scale_surgery.deriving.build import TOKENS
from scale_surgery.deriving.deepened import prove_copies
from scale_surgery.deriving.derive import derive, find_twins, read_real
from scale_surgery.errors import Problem
from scale_surgery.planning.architecture import Architecture
from scale_surgery.planning.depth import build_depth_specs, deepened_config
from scale_surgery.planning.per_layer import is_per_layer, per_layer_lists
from tests.conftest import problems, refused
from tests.own_code import save_pine
from tests.sweep.take import twin_config, write_base

OWN = RunOptions(trust_remote_code=True)
SMALL = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "pad_token_id": 0}
MIXTURE = {"intermediate_size": 96, "moe_intermediate_size": 32, "num_key_value_heads": 4, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
INDEX = {"index_topk": 4, "index_n_heads": 4, "index_head_dim": 32, "indexer_types": ["full", "shared"] * 2}
EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
SHARED = SMALL | MIXTURE | LATENT | INDEX | EXPERTS | {"mlp_layer_types": ["dense"] * 4}
LISTS = {"num_experts": 4, "moe_topk": [2, 2, 1, 2], "intermediate_size": 52, "head_dim": 16, "num_key_value_heads": 2}


def save(path: Path, model_type: str, **values: Any) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**values))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.1))
    model.save_pretrained(path)
    return path


@torch.no_grad()
def logits(path: Path) -> torch.Tensor:
    # longer than what an indexer selects
    ids = torch.randint(5, 60, (2, 40), generator=torch.Generator().manual_seed(1))
    model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True).eval()
    given: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return given


def shared_indexers(path: Path) -> Path:
    """Each second layer reads the tokens that the layer before it selected."""
    return save(path, "glm_moe_dsa", **SHARED)


def numbered_layers(path: Path) -> Path:
    """Each second layer computes with its number, which nothing in its modules tells."""
    return save_pine(path, sloped_layers=[False, True] * 2)


REFUSED = {
    shared_indexers: "GlmMoeDsaDecoderLayer with mlp_layer_types dense, layer_types indexed_attention, "
    "indexer_types full",
    numbered_layers: "Layer",
}


@pytest.mark.parametrize("make", REFUSED)
def test_copies_that_change_a_layer_above_are_refused(tmp_path, monkeypatch, make):
    base = make(tmp_path / "base")
    reason = Problem("layer-gives-other", layer=1)
    refusal = Problem("copies-change-output", "--layers 0", reason, kind=REFUSED[make])
    assert problems(plan, base, Request("0", method="depth"), run=OWN, error=PlanError) == [refusal]
    # copies that change none: above the last layer, or of a layer that selects no tokens
    layers = "1,3" if make is shared_indexers else "3"
    assert torch.equal(
        logits(base), logits(expand(base, Request(layers, method="depth"), tmp_path / "deep", run=OWN).path)
    )
    # the negative control: not refused, it is another model
    monkeypatch.setattr("scale_surgery.deriving.deepened.prove_copies", lambda *_: None)
    other = expand(base, Request("0", method="depth"), tmp_path / "other", run=OWN).path
    assert not torch.equal(logits(base), logits(other))


def test_all_layers_of_such_a_kind_are_named(tmp_path):
    (problem,) = problems(plan, shared_indexers(tmp_path / "base"), Request("all", method="depth"), error=PlanError)
    assert (problem.code, problem.where) == ("copies-change-output", "--layers 0,2")


def test_a_twin_selects_tokens():
    """Also where a limit is as large as the hidden state: it is shorter than the text of a twin."""
    for size in (2048, 256):
        _, *twins = find_twins(
            read_real(CONFIG_MAPPING["glm_moe_dsa"](**SHARED | {"index_topk": size, "hidden_size": 256}))
        )
        assert all(twin.index_topk < TOKENS[1] for twin in twins)


def test_each_block_is_mute_in_its_own_way(tmp_path, monkeypatch):
    """A norm comes after attention alone: it is mute in a copy, and so is the output projection of the MLP."""
    base = save_pine(tmp_path / "base", has_norm_after_attention=True)
    made = expand(base, Request("1", method="depth"), tmp_path / "deep", run=OWN)
    assert {tensor.source: tensor.init for tensor in made.plan.tensors if tensor.init != "copy"} == {
        "trunk.layers.1.after_attention.weight": "mute",
        "trunk.layers.1.mlp.down.weight": "zero",
    }
    assert torch.equal(logits(base), logits(made.path))
    # the negative control: with the norm alone, the copy of the MLP adds its output
    monkeypatch.setattr("scale_surgery.planning.depth._mute_blocks", only_norms)
    monkeypatch.setattr("scale_surgery.deriving.deepened.prove_copies", lambda *_: None)
    other = expand(base, Request("1", method="depth"), tmp_path / "other", run=OWN).path
    assert not torch.equal(logits(base), logits(other))


def only_norms(architecture: Architecture, layer: int) -> dict[str, dict[str, int]]:
    return {"": {f"{norm.name}.weight": 0 for norm in architecture.kind(layer).post_norms}}


def test_a_copy_that_is_not_mute_is_named(monkeypatch):
    config = CONFIG_MAPPING["llama"](**SMALL)
    architecture = derive(config).architecture
    (kind,) = architecture.kinds
    prove(config, architecture, (0, 2))
    attention, mlp = kind.blocks
    loud = replace(
        architecture,
        kinds=(
            replace(
                kind,
                blocks=(attention, replace(mlp, mute=())),
            ),
        ),
    )
    (problem,) = problems(prove, config, loud, (1, 3), error=PlanError)
    assert problem == Problem(
        "copies-change-output", "--layers 1,3", Problem("copy-adds-output", layer=1), kind="LlamaDecoderLayer"
    )


def prove(config: Any, architecture: Architecture, copied: tuple[int, ...]) -> None:
    plain = config.to_diff_dict() | {"model_type": config.model_type}
    deep = deepened_config(plain, build_depth_specs(architecture, copied), architecture)
    prove_copies(plain, deep, None, architecture, copied)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "values", "layer"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, 2),
        ("diffllama", {}, 2),
        # by their number, also below a copy
        ("minicpm3", {}, 0),
    ],
)
def test_layers_that_compute_with_their_number_or_with_how_many_they_are(model_type, values, layer):
    config = CONFIG_MAPPING[model_type](**values | {"num_hidden_layers": 4})
    architecture = derive(config).architecture
    (problem,) = problems(prove, config, architecture, (1,), error=PlanError)
    assert (problem.code, problem.details) == ("copies-change-output", (Problem("layer-gives-other", layer=layer),))
    if layer:
        prove(config, architecture, (3,))


def test_the_proof_is_of_these_layers(tmp_path):
    """One choice says nothing of another, though the config that is written is the same."""
    config = CONFIG_MAPPING["gpt2"](n_layer=4, n_embd=32, n_head=4, scale_attn_by_inverse_layer_idx=True)
    base = write_base(config, torch.float32, tmp_path / "base")
    for layers, is_refused in (("-1", False), ("1", True), ("-1", False)):
        if is_refused:
            with refused("copies-change-output", f"--layers {layers}", PlanError):
                plan(base, Request(layers, method="depth"))
        else:
            assert plan(base, Request(layers, method="depth")).layers == (3,)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ("falcon_h1", "mamba2"))
def test_lists_that_are_as_long_as_the_twin_are_not_those_of_layers(model_type, tmp_path):
    """Of Falcon-H1 two multipliers of the MLP and five of the state space, of Mamba 2 two limits."""
    config = twin_config(model_type)
    config.num_hidden_layers = 8
    base = write_base(config, torch.float32, tmp_path / "base")
    for layers in ("-1", "last:4", "0"):
        assert plan(base, Request(layers, method="depth")).numbering is not None


def test_lists_of_values_of_layers_whatever_their_key(tmp_path):
    base = save(tmp_path / "base", "hunyuan_v1_moe", **SMALL | LISTS)
    made = expand(base, Request("1-2", method="depth"), tmp_path / "deep")
    config = AutoModelForCausalLM.from_pretrained(made.path).config
    assert config.moe_topk == [2, 2, 2, 1, 1, 2] and config.num_experts == 4
    assert torch.equal(logits(base), logits(made.path))


def test_which_lists_have_a_value_for_each_layer():
    assert per_layer_lists({"moe_topk": [2, 1], "architectures": ["A", "B"], "sizes": [1, 2, 3], "scale": 3.0}, 2) == {
        "moe_topk": [2, 1]
    }
    assert is_per_layer("layer_types", ["a", "b", "c"], 2), "perhaps also of layers that predict further tokens"
    assert not is_per_layer("layer_types", ["a"], 2)
    assert not is_per_layer("eos_token_id", [1, 2], 2)
    assert is_per_layer("layer_rope_theta", [1.0, 2.0], 2) and not is_per_layer("rope_sections", [1, 2], 2)
