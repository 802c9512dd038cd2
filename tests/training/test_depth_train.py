"""Duplicated layers train alone, with any trainer; what was learned is taken out and put back on the base."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig

from scale_surgery import (
    CheckpointError,
    EvalData,
    PlanError,
    Request,
    TrainingError,
    TrainingSettings,
    apply,
    evaluate,
    expand,
    extract,
    freeze_base,
    load_expansion,
    merge,
    route_export,
    strip,
    train,
    verify,
)
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.checkpoint.hashes import hash_tensors
from scale_surgery.errors import Problem
from scale_surgery.folder.record import read_manifest
from scale_surgery.running.freeze import expansion_disabled, expansion_parts, train_in_float32
from tests.by_hand import save_base
from tests.conftest import Pair, digests, edited, load, problems, refused
from tests.each import mostly
from tests.families import FAMILIES
from tests.modeling.test_promises import prompts, unequal
from tests.modeling.test_promises import train as take_steps
from tests.training.test_train import SETTINGS, SHORT

Deep = Callable[..., Pair]


# one whose copies are mute by their output projections, one by norms after them, one whose linears are transposed
@pytest.mark.parametrize("family", mostly(FAMILIES, "gemma3_text".__eq__))
def test_only_the_copies_train(deep_of: Deep, family: str) -> None:
    pair = deep_of(family)
    model = freeze_base(pair.load())
    part_names = {part.name for part in expansion_parts(model)}
    stored = {info.stored_as for name, info in open_checkpoint(pair.path).tensors.items() if ".after." in name}
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == part_names == stored
    assert {part.group for part in expansion_parts(model)} == {"attn", "ffn", "norms"}
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    take_steps(model)
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == part_names
    assert unequal(pair.base, model) == [tuple(prompt["input_ids"].shape) for prompt in prompts()], "it learned"
    with expansion_disabled(model):
        assert unequal(pair.base, model) == unequal(pair.base, model, use_cache=False) == []
        options = {"max_new_tokens": 5, "do_sample": False}
        assert torch.equal(pair.base.generate(**prompts()[-2], **options), model.generate(**prompts()[-2], **options))
    assert unequal(pair.base, model), "on again"


def test_freeze_base_serves_every_method(pair_of: Deep, deep_of: Deep, base_of: Callable[..., Path]) -> None:
    model = pair_of("llama").load()
    wanted = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    model.requires_grad_(True)
    freeze_base(model)
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == wanted
    (found,) = problems(freeze_base, load(base_of("llama")), error=CheckpointError)
    assert found.phrase.startswith("model: ")


def test_a_model_saved_by_another_trainer_is_still_known(deep_of: Deep, tmp_path: Path) -> None:
    pair = deep_of("llama")
    model = freeze_base(pair.load())
    take_steps(model)
    model.save_pretrained(tmp_path / "saved")
    reloaded = freeze_base(load(tmp_path / "saved"))
    assert all(torch.equal(p, reloaded.get_parameter(n)) for n, p in model.named_parameters())
    for parameter in (*model.parameters(), *reloaded.parameters()):
        # where a tensor begins in memory may decide the last bit of a product
        parameter.data = parameter.data.clone()
    assert unequal(model, reloaded) == []
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [
        n for n, p in reloaded.named_parameters() if p.requires_grad
    ]
    checkpoint, base = open_checkpoint(tmp_path / "saved"), open_checkpoint(pair.base_path)
    assert hash_tensors(checkpoint, list(base.tensors)) == hash_tensors(base, list(base.tensors))


@pytest.mark.parametrize("family", mostly(("llama", "gemma2", "gpt2", "gpt_neox"), "gpt2".__eq__))
def test_what_trains_in_float32_computes_as_it_is_stored(deep_of: Deep, family: str) -> None:
    """The loss in training is the loss of the file, to the last bit; an update too small for bfloat16 is kept."""
    pair = deep_of(family, "bfloat16")
    model, stored = freeze_base(pair.load()), pair.load()
    train_in_float32(model)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    with torch.no_grad():
        for part in expansion_parts(model):
            part.parameter.add_(0.1).copy_(part.parameter.bfloat16())
            stored.get_parameter(part.name).copy_(part.parameter)
    assert unequal(stored, model) == []
    model(**prompts()[0]).logits.float().sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()} >= {
        part.name for part in expansion_parts(model) if "bias" not in part.name
    }
    with torch.no_grad():
        for part in expansion_parts(model):
            part.parameter.mul_(1 + 2**-13)
    assert unequal(stored, model) == [], "a thirty-second of a bfloat16 step"


@pytest.fixture(scope="module")
def deepened(place: Path) -> Path:
    """The shipped model with two layers duplicated."""
    return expand(SHIPPED_MODEL, Request("1,3", method="depth"), place / "deepened").path


def test_training_from_end_to_end(place: Path, deepened: Path, tmp_path: Path) -> None:
    before = digests(deepened)
    old, new = [place / "old.jsonl"], [place / "new.jsonl"]
    done = train(deepened, [place / "texts.jsonl"], tmp_path / "out", SETTINGS, eval_data=EvalData(old, new))
    assert digests(deepened) == before
    assert done.trained_parameters == 2 * 147_712
    result = verify(done.path, SHIPPED_MODEL)
    assert result.passed and (result.state, result.trained_tensors) == ("trained", 18)
    strip(done.path, tmp_path / "stripped")
    assert digests(tmp_path / "stripped") == digests(SHIPPED_MODEL)
    base, out, disabled = evaluate(done.path, old, new).scores
    assert (disabled.old, disabled.new) == (base.old, base.new), "bit for bit"
    assert out.forgetting == pytest.approx(done.measured["forgetting"], abs=1e-6)
    assert out.learning == pytest.approx(done.measured["learning"], abs=1e-6)
    assert out.learning is not None and out.learning > 0.1
    first = json.loads(done.log.read_text().splitlines()[0])
    assert (first["forgetting"], first["learning"]) == (0, 0), "before the first step it is its base"


@pytest.mark.slow
def test_groups_that_train(place: Path, deepened: Path, tmp_path: Path) -> None:
    settings = TrainingSettings(steps=2, groups=("ffn", "norms"), **SHORT)
    path = train(deepened, [place / "texts.jsonl"], tmp_path / "out", settings).path
    before, after = open_checkpoint(deepened), open_checkpoint(path)
    names = [tensor.name for tensor in read_manifest(path).plan.tensors]
    hashes_before, hashes_after = hash_tensors(before, names), hash_tensors(after, names)
    changed = {name for name in names if hashes_before[name] != hashes_after[name]}
    # the rate of the first step is zero, and before the second nothing but the output projections has a gradient
    assert changed == {f"model.layers.{layer}.after.mlp.down_proj.weight" for layer in (1, 3)}
    settings = TrainingSettings(steps=1, groups=("norms",), **SHORT)
    assert problems(train, deepened, [place / "texts.jsonl"], tmp_path / "none", settings, error=TrainingError) == [
        Problem("copies-stay-silent", deepened, groups=["attn", "ffn"])
    ]
    train(path, [place / "texts.jsonl"], tmp_path / "norms", settings)  # they are not mute any more
    settings = TrainingSettings(steps=1, groups=("w21", "head"), **SHORT)
    assert problems(train, deepened, [place / "texts.jsonl"], tmp_path / "none", settings, error=TrainingError) == [
        Problem("groups-without-tensors", deepened, groups=("w21", "head"), present=["norms", "attn", "ffn"])
    ]


@pytest.mark.parametrize("dtype", mostly(("float32", "bfloat16"), "bfloat16".__eq__))
def test_gradient_checkpointing_gives_the_same_gradients(deep_of: Deep, dtype: str) -> None:
    """A copy of a bfloat16 layer trains in float32 and computes in bfloat16, on the way back too."""
    gradients = []
    for is_on in (False, True):
        model = freeze_base(deep_of("qwen3", dtype).load()).train()
        train_in_float32(model)
        if is_on:
            # transformers 5 renamed it on the way
            old = model.gradient_checkpointing_enable
            getattr(model, "activation_checkpointing_enable", old)()
        model(**prompts()[0], labels=prompts()[0]["input_ids"], use_cache=False).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and any(grad.any() for grad in gradients[0].values())
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_apply_on_another_base_is_refused(deep_of: Deep, tmp_path: Path) -> None:
    pair = deep_of("llama")
    extract(pair.path, tmp_path / "extract")
    base = Path(shutil.copytree(pair.base_path, tmp_path / "base"))
    with edited(base / "model.safetensors") as tensors:
        tensors["model.layers.2.mlp.down_proj.weight"] += 1
    with refused("base-differs-apply", base, CheckpointError):
        apply(tmp_path / "extract", tmp_path / "again", base)
    assert not (tmp_path / "again").exists()
    # the control: on its own base it comes back, byte for byte
    apply(tmp_path / "extract", tmp_path / "again", pair.base_path)
    assert digests(tmp_path / "again") == digests(pair.path)


def test_what_makes_no_sense_for_copies_is_refused(deep_of: Deep, tmp_path: Path) -> None:
    pair = deep_of("llama")
    extract(pair.path, tmp_path / "extract")
    for to in ("fused", "stock"):
        with refused("deepened-is-stock", pair.path, PlanError):
            merge(pair.path, tmp_path / "out", to)
    with refused("deepened-not-routed", pair.path, PlanError):
        route_export(pair.path, tmp_path / "out")
    with refused("deepened-in-memory", tmp_path / "extract", PlanError):
        load_expansion(pair.base, tmp_path / "extract")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["extract"]


@pytest.mark.slow
def test_copies_of_a_mixture_s_layers_train(place: Path, tmp_path: Path) -> None:
    """Experts are one tensor in memory, and lie apart on disk, where each copied tensor is of its own."""
    shipped = AutoConfig.from_pretrained(SHIPPED_MODEL)
    tokens = {name: getattr(shipped, name) for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(**tokens, **sizes, num_hidden_layers=2, num_local_experts=4)
    base = save_base(tmp_path / "base", AutoModelForCausalLM.from_config(config))
    for file in SHIPPED_MODEL.glob("tokenizer*"):
        shutil.copy(file, base)
    deep = expand(base, Request("0", method="depth"), tmp_path / "deep").path
    done = train(deep, [place / "texts.jsonl"], tmp_path / "out", SETTINGS)
    result = verify(done.path, base)
    assert result.passed and result.state == "trained"
    # every tensor of the copy learned, each expert's own among them, if a token went there
    before, after = open_checkpoint(deep), open_checkpoint(done.path)
    new = [name for name in after.tensors if ".after." in name]
    assert sum(".experts." in name for name in new) == 12
    hashes_before, hashes_after = hash_tensors(before, new), hash_tensors(after, new)
    assert sum(hashes_before[name] != hashes_after[name] for name in new) == result.trained_tensors == len(new)
    assert digests(strip(done.path, tmp_path / "stripped").path) == digests(base)
    with refused("copies-stay-silent", deep, TrainingError):
        settings = TrainingSettings(steps=1, groups=("norms",), **SHORT)
        train(deep, [place / "texts.jsonl"], tmp_path / "none", settings)
