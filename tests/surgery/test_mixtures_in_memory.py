"""load_expansion on mixtures of experts, which transformers stores and keeps in memory under other names."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from scale_surgery import Request, apply, expand, extract, load_expansion
from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.errors import CheckpointError, Problem
from tests.by_hand import save_base
from tests.conftest import digests, load, problems, shake
from tests.each import mostly
from tests.routed import random_ids
from tests.surgery.test_load_expansion import assert_same

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
CONFIGS = {
    # experts lie apart, and are called otherwise, on disk
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, intermediate_size=24, num_local_experts=4),
    # experts lie apart, beside a layer without any
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SMALL, intermediate_size=40, moe_intermediate_size=24, num_experts=4, mlp_only_layers=[0]
    ),
    # experts are one tensor on disk, too
    "gpt_oss": lambda: transformers.GptOssConfig(**SMALL, intermediate_size=24, num_local_experts=4, sliding_window=8),
}


@dataclass(frozen=True)
class Made:
    """A base, an expansion of it that has learned, and its extract."""

    base: Path
    expanded: Path
    extracted: Path


def expand_it(base: Path, folder: Path) -> Made:
    request = Request("all", variant="adapt", collaborate="both", init_w22="random")
    expanded = shake(expand(base, request, folder / "expanded").path)
    return Made(base, expanded, extract(expanded, folder / "extract").path)


@pytest.fixture(scope="module")
def made_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    @functools.cache
    def make(name: str, dtype: torch.dtype = torch.float32) -> Made:
        folder = tmp_path_factory.mktemp(name)
        model = load(save_base(folder / "whole", transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())))
        # an expert's tensors lie in several files
        model.to(dtype).save_pretrained(folder / "base", max_shard_size="20KB")
        assert len(list((folder / "base").glob("*.safetensors"))) > 3
        return expand_it(folder / "base", folder)

    return make


@pytest.mark.parametrize(
    ("name", "dtype"),
    mostly(
        [("mixtral", torch.bfloat16), ("qwen3_moe", torch.float32), ("gpt_oss", torch.float32)],
        lambda case: case[0] == "mixtral",
    ),
)
def test_it_is_what_the_folder_gives(made_of, tmp_path, name, dtype):
    made = made_of(name, dtype)
    folder = apply(made.extracted, tmp_path / "applied", made.base).path
    base, expected = load(made.base), load(folder)
    before = base(random_ids(2, 9)).logits
    ids = random_ids(2, 5)
    for model in (load_expansion(base, made.extracted), load_expansion(made.base, made.extracted).eval()):
        assert_same(model, expected)
        options = {"max_new_tokens": 5, "do_sample": False}
        assert torch.equal(model.generate(ids, **options), expected.generate(ids, **options))
        assert not torch.equal(model(random_ids(2, 9)).logits, before), "the negative control: the expansion speaks"
        with model.expansion_disabled():
            assert torch.equal(model(random_ids(2, 9)).logits, before)
    assert torch.equal(base(random_ids(2, 9)).logits, before)
    expanded = load_expansion(base, made.extracted)
    shared = {parameter.data_ptr() for parameter in base.parameters()}
    assert {parameter.data_ptr() for parameter in expanded.parameters() if not parameter.requires_grad} == shared, (
        "not a copy"
    )


@pytest.mark.parametrize(
    ("name", "parameter", "rows", "stored"),
    [
        # gate and up of an expert are one tensor in memory, gate first
        ("mixtral", "experts.gate_up_proj", 24, "model.layers.1.block_sparse_moe.experts.2.w3.weight"),
        ("mixtral", "experts.gate_up_proj", 0, "model.layers.1.block_sparse_moe.experts.2.w1.weight"),
        ("qwen3_moe", "experts.down_proj", 0, "model.layers.1.mlp.experts.2.down_proj.weight"),
        ("gpt_oss", "experts.down_proj", 0, "model.layers.1.mlp.experts.down_proj"),
    ],
)
def test_one_changed_weight_of_an_expert_is_named(made_of, tmp_path, name, parameter, rows, stored):
    made = made_of(name)
    base = load(made.base)
    with torch.no_grad():
        base.get_parameter(f"model.layers.1.mlp.{parameter}")[2, rows, 3] += 1e-3
    count = len(open_checkpoint(made.base).tensors)
    base.save_pretrained(tmp_path / "changed")
    counts = {"count": 1, "total": count, "base": made.base.name}
    for title, changed in (("model", base), (tmp_path / "changed", tmp_path / "changed")):
        differs = Problem("base-differs-load", title, Problem("base-tensor-bytes", stored), **counts)
        assert problems(load_expansion, changed, made.extracted, error=CheckpointError) == [differs]
    # unless any values are taken
    model = load_expansion(base, made.extracted, check=False)
    with model.expansion_disabled():
        assert torch.equal(model(random_ids(1, 5)).logits, base(random_ids(1, 5)).logits)


def test_another_base_is_refused(made_of):
    made = made_of("mixtral")
    config = transformers.AutoConfig.from_pretrained(made.base)
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config)
    (problem,) = problems(load_expansion, model, made.extracted, error=CheckpointError)
    assert (problem.code, problem.where) == ("base-differs-load", "model")
    assert problem.values == {"count": 41, "total": 41, "base": "base"}
    config.num_local_experts = 5
    model = transformers.AutoModelForCausalLM.from_config(config)
    (problem,) = problems(load_expansion, model, made.extracted, check=False, error=CheckpointError)
    assert (problem.code, problem.where) == ("base-unfit", "model") and len(problem.details) == 26
    gate = "model.layers.0.block_sparse_moe.gate.weight"
    assert problem.details[0] == Problem("tensor-shape", gate, shape=(5, 32), planned=(4, 32))
    with pytest.raises(CheckpointError, match=r"^model: is a Qwen3MoeForCausalLM, expected MixtralForCausalLM or Mix"):
        load_expansion(load(made_of("qwen3_moe").base), made.extracted)


def test_a_model_without_a_head_and_experts_that_are_run_as_the_base_runs_them(made_of):
    made, ids = made_of("mixtral"), random_ids(2, 5)
    options = {"experts_implementation": "eager"}
    base, expected = (
        transformers.AutoModel.from_pretrained(folder, **options) for folder in (made.base, made.expanded)
    )
    model = load_expansion(base, made.extracted)
    assert torch.equal(model(ids).last_hidden_state, expected(ids).last_hidden_state)
    assert model.config._experts_implementation == "eager"


def test_names_that_transformers_reads_and_does_not_write(made_of, tmp_path):
    """Mixtral with its modules called on disk as in memory: read, but saved otherwise."""
    base = shutil.copytree(made_of("mixtral").base, tmp_path / "base")
    (base / "model.safetensors.index.json").unlink()
    tensors = {}
    for file in base.glob("*.safetensors"):
        tensors |= {name.replace("block_sparse_moe", "mlp"): tensor for name, tensor in load_file(file).items()}
        file.unlink()
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    made = expand_it(base, tmp_path)
    assert "model.layers.0.mlp.expansions.default.w21" in open_checkpoint(made.expanded).tensors
    assert_same(load_expansion(load(base), made.extracted), load(made.expanded))
    with_usual_names = open_checkpoint(made_of("mixtral").expanded).tensors
    assert "model.layers.0.block_sparse_moe.expansions.default.w21" in with_usual_names
    assert digests(apply(made.extracted, tmp_path / "applied", base).path) == digests(made.expanded)
