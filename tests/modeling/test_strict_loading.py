"""Loading fails on any tensor that is missing, unexpected or of another shape; stock code would warn and go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM

from scale_surgery import Request, expand
from scale_surgery.checkpoint.expansions import DEFAULT_NAME
from scale_surgery.checkpoint.names import INDEX_FILE
from tests.by_hand import make_base
from tests.composed import OTHERS
from tests.conftest import edited
from tests.routed import random_ids

OWN = f"expansions.{DEFAULT_NAME}"
SHARD, NEW_SHARD = "model-00001-of-00001.safetensors", "expansion-default-00001-of-00001.safetensors"
HEAD_UP = f"lm_head.{OWN}.up_weight"
EXPERT = {
    "mixtral": "model.layers.1.block_sparse_moe.experts.3.w1.weight",
    "qwen3_moe": "model.layers.1.mlp.experts.3.gate_proj.weight",
}
Change = Callable[[dict[str, torch.Tensor]], Any]


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Path]:
    """Expand a base, and change what a shard of the expanded model holds."""

    def make(name: str = "mixtral", change: Change | None = None, shard: str = SHARD, **options: Any) -> Path:
        config = OTHERS[name]()
        config.update(options)
        base = make_base(tmp_path / "base", config)
        path = expand(base, Request("1", variant="adapt", collaborate="both"), tmp_path / "expanded").path
        if change is not None:
            respoil(path, change, shard)
        return path

    return make


def respoil(path: Path, change: Change, shard: str) -> None:
    """Change what a shard holds, and let the index say so."""
    with edited(path / shard) as tensors:
        change(tensors)
    with edited(path / INDEX_FILE) as content:
        kept = {name: file for name, file in content["weight_map"].items() if file != shard}
        content["weight_map"] = kept | dict.fromkeys(tensors, shard)


@pytest.mark.parametrize("name", EXPERT)
def test_experts_are_stored_one_by_one_and_loaded_as_the_base_s(made, tmp_path, name):
    path = made(name)
    assert EXPERT[name] in load_file(path / SHARD)
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert {key: len(entries) for key, entries in info.items()} == dict.fromkeys(info, 0)
    stock = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "base").named_parameters())
    assert stock and all(torch.equal(parameter, model.get_parameter(key)) for key, parameter in stock.items())
    model.save_pretrained(tmp_path / "saved")
    assert {name for file in (tmp_path / "saved").glob("*.safetensors") for name in load_file(file)} == {
        name for shard in (SHARD, NEW_SHARD) for name in load_file(path / shard)
    }


@pytest.mark.parametrize("name", EXPERT)
def test_without_the_stock_conversion_no_expert_is_found(made, monkeypatch, name):
    """The control of the test above: experts that would be initialised anew are refused."""
    from transformers import conversion_mapping

    path = made(name)
    model = AutoModelForCausalLM.from_pretrained(path)
    known = conversion_mapping._checkpoint_conversion_mapping_cache
    for key in (type(model).__name__, model.config.model_type):
        monkeypatch.delitem(known, key, raising=False)
    with pytest.raises(ValueError, match=r"mlp\.experts\.down_proj is missing"):
        AutoModelForCausalLM.from_pretrained(path)


@pytest.mark.parametrize(
    ("shard", "change", "problem"),
    [
        (SHARD, lambda tensors: tensors.pop("model.norm.weight"), "model.norm.weight is missing"),
        (
            NEW_SHARD,
            lambda tensors: tensors.pop(f"model.layers.1.block_sparse_moe.{OWN}.w12"),
            f"model.layers.1.mlp.{OWN}.w12 is missing",
        ),
        (NEW_SHARD, lambda tensors: tensors.pop(HEAD_UP), f"{HEAD_UP} is missing"),
        (
            NEW_SHARD,
            lambda tensors: tensors.update({f"model.layers.0.mlp.{OWN}.w12": torch.zeros(2)}),
            f"model.layers.0.mlp.{OWN}.w12 is unexpected",
        ),
        (NEW_SHARD, lambda tensors: tensors.update({"stray.weight": torch.zeros(2)}), "stray.weight is unexpected"),
    ],
)
def test_what_does_not_fit_is_named(made, shard, change, problem):
    path = made(change=change, shard=shard)
    with pytest.raises(ValueError, match=f"ScaleMixtralForCausalLM: the files do not hold its tensors: {problem}. "):
        AutoModelForCausalLM.from_pretrained(path)
    with pytest.raises(ValueError, match=problem):
        AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, strict_loading=False)
    assert OWN not in problem or "missing" not in problem or not model.get_parameter(problem.split()[0]).any()
    assert problem.split()[0] in {*info["missing_keys"], *info["unexpected_keys"]}


def test_another_shape_is_refused_even_where_it_is_asked_to_be_ignored(made):
    path = made(change=lambda tensors: tensors.update({"model.norm.weight": torch.ones(33)}))
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForCausalLM.from_pretrained(path)
    with pytest.raises(ValueError, match=r"model\.norm\.weight is of another shape"):
        AutoModelForCausalLM.from_pretrained(path, ignore_mismatched_sizes=True)


def test_many_are_not_all_named(made):
    path = made(
        change=lambda tensors: [
            tensors.pop(name) for name in list(tensors) if name.endswith(("norm.weight", "q_proj.weight"))
        ]
    )
    with pytest.raises(ValueError, match=r"layers\.0\.input_layernorm\.weight is missing.* and 2 more\. Nothing may"):
        AutoModelForCausalLM.from_pretrained(path)


def test_a_missing_expert_is_refused(made):
    path = made(change=lambda tensors: tensors.pop(EXPERT["mixtral"]))
    with pytest.raises(RuntimeError, match="issues during automatic conversion of the weights"):
        AutoModelForCausalLM.from_pretrained(path)


@pytest.mark.parametrize("tied", (False, True))
def test_a_model_without_a_head_needs_none(made, tied):
    path = made(tie_word_embeddings=tied)
    assert ("lm_head.weight" in load_file(path / SHARD)) != tied
    model, info = AutoModel.from_pretrained(path, output_loading_info=True)
    assert set(info["unexpected_keys"]) == {HEAD_UP} | (set() if tied else {"lm_head.weight"})
    assert model.get_output_embeddings() is None


def test_a_model_without_a_head_needs_all_else(made):
    path = made(
        change=lambda tensors: tensors.update({f"model.layers.7.mlp.{OWN}.w12": torch.zeros(2)}), shard=NEW_SHARD
    )
    with pytest.raises(ValueError, match=rf"ScaleMixtralModel.*layers\.7\.mlp\.{OWN}\.w12 is unexpected"):
        AutoModel.from_pretrained(path)


def test_a_head_is_needed_where_it_is_not_tied(made, tmp_path):
    AutoModel.from_pretrained(made()).save_pretrained(tmp_path / "alone")
    assert AutoModel.from_pretrained(tmp_path / "alone")(random_ids(2, 9))[0].shape[-1] > 32
    with pytest.raises(ValueError, match=f"{HEAD_UP} is missing, lm_head.weight is missing"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "alone")


@pytest.mark.parametrize(
    "options", [{"quantization_config": SimpleNamespace(load_in_4bit=True)}, {"load_in_8bit": True}]
)
def test_linears_that_would_not_be_quantised_are_refused(made, options):
    """transformers would leave them in floats, and say that the model is quantised."""
    with pytest.raises(ValueError, match="would leave every widened linear as it is"):
        AutoModelForCausalLM.from_pretrained(made("qwen3_moe"), **options)


def test_replicas_of_modules_are_refused(made):
    """They have no parameters, so a gate would be missing without a word."""
    with pytest.raises(RuntimeError, match="expected one process for each GPU"):
        AutoModelForCausalLM.from_pretrained(made())._replicate_for_data_parallel()


@pytest.mark.parametrize(
    "options",
    [{"tp_plan": "auto"}, {"tp_size": 2}, {"distributed_config": SimpleNamespace(tp_size=2, tp_plan=None)}],
)
def test_matrices_that_are_split_over_processes_are_refused(made, options):
    """The product of blocks would be added once for each process."""
    with pytest.raises(ValueError, match="Tensor parallelism splits the base's matrices"):
        AutoModelForCausalLM.from_pretrained(made("qwen3_moe"), **options)


def test_kernels_in_place_of_modules_are_refused(made):
    """They know one stream, and would take the norm of two together."""
    path = made()
    with pytest.raises(ValueError, match="use_kernels: would replace norms"):
        AutoModelForCausalLM.from_pretrained(path, use_kernels=True)
    with pytest.raises(ValueError, match="use_kernels: would replace norms"):
        AutoModelForCausalLM.from_pretrained(path).set_use_kernels(True)
