"""The pilot: it trains what it says, as a plain loop would, and measures the change of every role."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.deriving.base import read_base
from scale_surgery.errors import TrainingError
from scale_surgery.progress import no_progress, no_track
from scale_surgery.running.sequences import Sequences
from scale_surgery.training.pilot import batches, choose_precision, run_pilot, share_of_rate, time_step
from scale_surgery.training.pilot_changes import find_matrices, measure_updates, relative_changes
from scale_surgery.training.pilot_settings import PilotSettings
from scale_surgery.training.update_scores import relative_norm
from tests.conftest import load
from tests.each import each_shape
from tests.families import FAMILIES

CPU = torch.device("cpu")
SETTINGS = PilotSettings(steps=4, batch_size=2, learning_rate=1e-3)
GATED = {"gate", "up_proj", "down"}


def text(rows: int = 6, length: int = 12, vocabulary: int = 97) -> Sequences:
    ids = torch.randint(3, vocabulary, (rows * length,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    return Sequences(ids, ids.clone(), tuple(range(0, rows * length + 1, length)))


def run(path, settings=SETTINGS, model=None):
    model = model or load(path, dtype="auto")
    return model, run_pilot(model, read_base(open_checkpoint(path)), text(), settings, settings.steps, CPU, no_track)


def changed(path, model) -> set[str]:
    before = dict(load(path, dtype="auto").named_parameters())
    return {name for name, own in model.named_parameters() if not torch.equal(own, before[name].to(own.dtype))}


@pytest.mark.parametrize("trains", ["mlp", "full"])
@each_shape
def test_what_trains_and_what_is_measured(base_of, family, trains):
    path = base_of(family)
    model, pilot = run(path, replace(SETTINGS, trains=trains, steps=2))
    mlp = GATED if family not in ("gpt2", "gpt_neox") else GATED - {"gate"}
    roles = mlp if trains == "mlp" else mlp | {"q", "k", "v", "o"}
    assert {layer: set(found) for layer, found in pilot.updates.items()} == dict.fromkeys(range(3), roles)
    assert all(update.values.max() > 0 for found in pilot.updates.values() for update in found.values())
    expected = {name for name, _ in model.named_parameters()}
    if trains == "mlp":
        linears = [linear.name for linear in FAMILIES[family].linears if linear.group == "ffn"]
        expected = {name for name in expected if any(f".{own}.weight" in name for own in linears)}
    assert changed(path, model) <= expected
    # a bias of the keys moves all scores of a query alike, and that of an ignored row nothing
    assert len(changed(path, model)) >= len(expected) - 3


@pytest.mark.parametrize("family", ["phi3", "gpt_neox", "gpt2", "llama"])
def test_the_change_of_a_role_is_that_of_its_rows(base_of, family):
    path = base_of(family)
    model, pilot = run(path, replace(SETTINGS, trains="full"))
    base = read_base(open_checkpoint(path))
    (first, *_) = find_matrices(model, base, ("attn",))
    (start, *_) = find_matrices(load(path), base, ("attn",))
    difference = first.module.weight.detach() - start.module.weight.detach()
    rows = difference.T if FAMILIES[family].transposed else difference
    size = 10
    if family == "gpt_neox":
        rows = rows.view(4, 3, size, 40)[:, 0].reshape(4 * size, 40)
    values = torch.linalg.svdvals(rows[: 4 * size].double())
    torch.testing.assert_close(pilot.updates[0]["q"].values.flip(0), values.flip(0), rtol=1e-6, atol=1e-8)


def plain_loop(model, settings) -> list[float]:
    """The same training, with one optimizer that steps when every gradient is there."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".mlp." in name and name.endswith("weight"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, weight_decay=0.0)
    losses = []
    model.train()
    for step, batch in zip(range(1, settings.steps + 1), batches(text(), settings), strict=False):
        optimizer.param_groups[0]["lr"] = settings.learning_rate * share_of_rate(step, settings.steps)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("checkpointing", [False, True])
def test_it_trains_as_a_plain_loop_does(llama, checkpointing):
    settings = replace(SETTINGS, steps=5, gradient_checkpointing=checkpointing)
    reference = load(llama.base_path)
    losses = plain_loop(reference, settings)
    model, pilot = run(llama.base_path, settings)
    for own, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(own, expected)
    assert (pilot.first_loss, pilot.last_loss) == (losses[0], losses[-1])
    other, _ = run(llama.base_path, replace(settings, seed=1))
    assert not torch.equal(other.model.layers[0].mlp.up_proj.weight, reference.model.layers[0].mlp.up_proj.weight)


def test_a_tied_embedding_takes_one_step_a_step(base_of):
    path = base_of("llama", tied=True)
    settings = replace(SETTINGS, trains="full", steps=1)
    model, _ = run(path, settings)
    before = load(path).model.embed_tokens.weight.detach()
    # the first step of AdamW is the learning rate, whatever the gradient
    difference = (model.model.embed_tokens.weight.detach() - before).abs().max()
    assert float(difference) == pytest.approx(settings.learning_rate, rel=1e-3)


def test_half_precision_trains_in_float32_and_the_rest_stays_as_it_is(base_of):
    path = base_of("llama", "bfloat16")
    model, pilot = run(path, replace(SETTINGS, learning_rate=1e-6))
    dtypes = {name: own.dtype for name, own in model.named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == {
        f"model.layers.{layer}.mlp.{part}_proj.weight" for layer in range(3) for part in ("gate", "up", "down")
    }
    # a step of 1e-6 would vanish in bfloat16
    assert all(0 < float(update.values.max()) < 1e-3 for found in pilot.updates.values() for update in found.values())


def test_float32_can_be_asked_for(base_of):
    model = load(base_of("llama", "bfloat16"), dtype="auto")
    choose_precision(model, PilotSettings(bf16=False), CPU)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3"])
def test_the_relative_change_until_now_is_that_of_the_updates(base_of, family):
    path = base_of(family)
    model, pilot = run(path)
    checkpoint = open_checkpoint(path)
    now = relative_changes(find_matrices(model, read_base(checkpoint), ("ffn",)), checkpoint)
    for layer, updates in pilot.updates.items():
        assert now[layer] == pytest.approx(relative_norm(list(updates.values())), rel=1e-5)
        assert 0 < pilot.halfway[layer] < now[layer]


def test_timing_a_step_leaves_the_model_and_the_random_numbers_as_they_were(llama):
    model = load(llama.base_path)
    torch.manual_seed(5)
    assert time_step(model, text(), SETTINGS, CPU) > 0
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), drawn)
    reference, _ = run(llama.base_path)
    own, _ = run(llama.base_path, model=model)
    for one, other in zip(own.parameters(), reference.parameters(), strict=True):
        assert torch.equal(one, other)


def test_random_numbers_of_the_caller_stay_his(llama):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    run(llama.base_path)
    assert torch.equal(torch.rand(3), expected)


def test_a_loss_that_is_no_number(llama):
    model = load(llama.base_path)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(TrainingError) as caught:
        run(llama.base_path, model=model)
    assert str(caught.value) == (
        "The loss is nan at step 1 of the pilot, with a learning rate of 0.001. Lower --learning-rate."
    )


def test_weights_that_are_no_numbers(llama):
    """The last step may break what no loss sees any more."""
    model, base = load(llama.base_path), read_base(open_checkpoint(llama.base_path))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = float("inf")
    with pytest.raises(TrainingError) as caught:
        measure_updates(find_matrices(model, base, ("ffn",)), base, no_progress)
    assert str(caught.value) == (
        "model.layers.1.mlp.up_proj.weight: holds numbers that are not finite after the pilot. Lower --learning-rate."
    )


def test_every_sequence_is_read_as_often_as_the_others():
    rows = itertools.islice(batches(text(rows=5), PilotSettings(batch_size=2)), 5)
    seen = [tuple(row.tolist()) for batch in rows for row in batch["input_ids"]]
    assert sorted(seen) == sorted(2 * [tuple(text(rows=5)[row]["input_ids"].tolist()) for row in range(5)])
    first = [next(batches(text(), PilotSettings(seed=seed)))["input_ids"] for seed in (0, 0, 1)]
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])


def test_the_rate_rises_and_falls():
    shares = [share_of_rate(step, 100) for step in range(1, 101)]
    assert shares[5] == 1.0
    assert shares[:6] == sorted(shares[:6])
    assert shares[5:] == sorted(shares[5:], reverse=True)
    assert 0 < shares[-1] < 0.02
    assert share_of_rate(1, 1) == 1.0
