"""The pilot: it trains what it says, as a plain loop would, and measures how much each layer changed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import transformers

from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.deriving.base import read_base
from scale_surgery.errors import Problem, TrainingError
from scale_surgery.progress import no_track
from scale_surgery.text.sequences import Sequences
from scale_surgery.text.tokenizing import collate
from scale_surgery.training import pilot as pilot_module
from scale_surgery.training.pilot import run_pilot, share_of_rate
from scale_surgery.training.ranking import RankingSettings
from tests.conftest import load, problems
from tests.each import each_shape
from tests.families import FAMILIES
from tests.tiny import LLAMA_LIKE, TOKENS

SETTINGS = RankingSettings(batch_size=2, learning_rate=1e-3)
LENGTH = 12


def text(rows: int = 6, vocabulary: int = 97) -> Sequences:
    ids = torch.randint(3, vocabulary, (rows * LENGTH,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    return Sequences(ids, ids.clone(), tuple(range(0, rows * LENGTH + 1, LENGTH)))


def run(path, settings=SETTINGS, steps=4, model=None):
    model = model or load(path, dtype="auto")
    return model, run_pilot(model, read_base(open_checkpoint(path)).architecture, text(), settings, steps, no_track)


def changed(path, model) -> set[str]:
    before = dict(load(path, dtype="auto").named_parameters())
    return {
        name
        for name, parameter in model.named_parameters()
        if not torch.equal(parameter, before[name].to(parameter.dtype))
    }


@each_shape
def test_the_matrices_of_mlps_train_and_nothing_else(base_of, family):
    path = base_of(family)
    model, pilot = run(path, steps=2)
    linears = [linear.name for linear in FAMILIES[family].linears if linear.group == "ffn"]
    expected = {name for name, _ in model.named_parameters() if any(f".{linear}.weight" in name for linear in linears)}
    assert changed(path, model) == expected
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters()), "they hold its memory"
    assert pilot.trained_parameters == sum(dict(model.named_parameters())[name].numel() for name in expected)
    assert sorted(pilot.changes) == [0, 1, 2] and all(change > 0 for change in pilot.changes.values())


@pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), ("llama", "bfloat16"), ("phi3", "bfloat16")])
def test_the_change_of_a_layer_is_relative_to_its_norm(base_of, family, dtype):
    path = base_of(family, dtype)
    model, pilot = run(path)
    before, after = load(path, dtype="auto"), dict(model.named_parameters())
    for layer, change in pilot.changes.items():
        names = [name for name in changed(path, model) if f"layers.{layer}." in name]
        old = torch.cat([before.get_parameter(name).detach().double().flatten() for name in names])
        new = torch.cat([after[name].detach().double().flatten() for name in names])
        assert change == pytest.approx(float((new - old).norm() / old.norm()), rel=1e-6)


def test_experts_train_and_a_layer_without_them_has_its_mlp(tmp_path):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0]}
    config = transformers.Qwen3MoeConfig(**(LLAMA_LIKE | TOKENS | experts | {"intermediate_size": 56, "head_dim": 12}))
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "experts")
    model, pilot = run(tmp_path / "experts")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name for name in trained if "layers.0." in name} == {
        f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")
    }
    assert all(".mlp." in name for name in trained) and any("layers.1.mlp.experts" in name for name in trained)
    assert all(change > 0 for change in pilot.changes.values())


def test_half_precision_trains_in_float32_and_the_rest_stays_as_it_is(base_of, monkeypatch):
    # a processor without instructions for bfloat16 computes all of it in float32
    monkeypatch.setattr(pilot_module, "has_bfloat16", lambda device: True)
    path = base_of("llama", "bfloat16")
    # a step of 1e-6 would vanish in bfloat16
    model, pilot = run(path, replace(SETTINGS, learning_rate=1e-6))
    assert {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32} == changed(
        path, model
    )
    assert all(0 < change < 1e-3 for change in pilot.changes.values())


def plain_loop(model, settings, steps) -> list[float]:
    """The same training, with one optimizer that steps when every gradient is there."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".mlp." in name and name.endswith("weight"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, weight_decay=0.0)
    order = torch.Generator().manual_seed(settings.seed)
    loader = torch.utils.data.DataLoader(text(), 2, shuffle=True, collate_fn=collate, generator=order)
    batches = [batch for _ in range(steps) for batch in loader]
    losses = []
    model.train()
    for step, batch in zip(range(1, steps + 1), batches, strict=False):
        optimizer.param_groups[0]["lr"] = settings.learning_rate * share_of_rate(step, steps, warm_up=1)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("checkpointing", [False, True])
def test_it_trains_as_a_plain_loop_does(llama, checkpointing):
    settings = replace(SETTINGS, gradient_checkpointing=checkpointing)
    reference = load(llama.base_path)
    losses = plain_loop(reference, settings, 5)
    model, pilot = run(llama.base_path, settings, 5)
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        # the loss is read in pieces, so last bits of gradients differ, and AdamW divides by gradients
        torch.testing.assert_close(parameter, expected, rtol=0, atol=settings.learning_rate / 100)
    assert (pilot.first_loss, pilot.last_loss) == pytest.approx((losses[0], losses[-1]), rel=1e-6)
    reseeded_model, _ = run(llama.base_path, replace(settings, seed=1), 5)
    assert not torch.equal(
        reseeded_model.model.layers[0].mlp.up_proj.weight, reference.model.layers[0].mlp.up_proj.weight
    )


def test_random_numbers_of_the_caller_stay_his(llama):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    run(llama.base_path)
    assert torch.equal(torch.rand(3), expected)


def test_numbers_that_are_not_finite_are_refused(llama):
    model = load(llama.base_path)
    # between the loss and the step: the last step may break what no loss sees any more
    model.model.layers[1].mlp.up_proj.weight.register_hook(lambda gradient: gradient.fill_(math.nan))
    assert problems(run, llama.base_path, model=model, steps=1, error=TrainingError) == [
        Problem("pilot-layer-not-finite", "pilot", layer=1)
    ]
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    (found,) = problems(run, llama.base_path, model=model, error=TrainingError)
    assert found.phrase == "pilot: the loss is nan at step 1, at a learning rate of 0.001"


def test_the_rate_rises_and_falls():
    shares = [share_of_rate(step, 100, warm_up=6) for step in range(1, 101)]
    assert shares[5] == 1.0
    assert shares[:6] == sorted(shares[:6])
    assert shares[5:] == sorted(shares[5:], reverse=True)
    assert 0 < shares[-1] < 0.02
    assert share_of_rate(1, 1, warm_up=1) == 1.0
