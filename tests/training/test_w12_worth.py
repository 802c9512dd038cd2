"""Where W12 is worth it: gradients, promises and divergences, each against a measurement of its own."""

from __future__ import annotations

import pytest
import torch

from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.deriving.planned import make_plan
from scale_surgery.planning.request import Request
from scale_surgery.progress import no_progress, no_track
from scale_surgery.running.loss import measure
from scale_surgery.training import w12_worth
from scale_surgery.training.w12_worth import (
    PROMISED,
    estimate_worth,
    expanded_for_a_while,
    find_w12,
    measure_divergence,
    measure_energy,
    spread_batches,
    stepped,
    worth,
)
from tests.conftest import digests, load
from tests.each import each_shape
from tests.training.test_rank_layers_pilot import text

CPU = torch.device("cpu")


def plan_of(path, layers="all", **options):
    request = Request(layers, variant="adapt", collaborate="both", dtype="float32", **options)
    return make_plan(open_checkpoint(path), request, name="base")


@pytest.fixture
def opened(llama):
    """The tiny llama, expanded in all layers, its W12, and the gradient on some text."""
    plan = plan_of(llama.base_path)
    with expanded_for_a_while(open_checkpoint(llama.base_path), plan, CPU, no_track) as model:
        found = find_w12(model, plan)
        learn = spread_batches(text(), 1000, model)
        yield model, found, measure_energy(model, found, learn, no_progress)


@each_shape
def test_every_family_is_estimated_and_left_as_it_was(base_of, family):
    path = base_of(family, tied=family == "llama")
    before = digests(path)
    found = estimate_worth(open_checkpoint(path), plan_of(path), text(), text(), CPU, no_track)
    assert [one.layer for one in found] == [0, 1, 2]
    for one in found:
        assert one.gradient_energy > 0
        assert one.divergence > 0
        assert one.worth == worth(one.gradient_energy, one.divergence)
    assert digests(path) == before


def test_half_precision_is_estimated_as_float32(base_of, tmp_path):
    """The divergence of a small step is far below the rounding of bfloat16, in which the base is stored."""
    path = base_of("qwen3", "bfloat16")
    whole = tmp_path / "float32"
    load(path, dtype=torch.float32).save_pretrained(whole)
    half, single = (
        estimate_worth(open_checkpoint(one), plan_of(path), text(), text(), CPU, no_track) for one in (path, whole)
    )
    for one, other in zip(half, single, strict=True):
        assert one.divergence == pytest.approx(other.divergence, rel=0.05)
        assert one.worth == pytest.approx(other.worth, rel=0.05)


def test_before_a_step_the_model_is_its_base(llama, opened):
    model, _, _ = opened
    ids = text()[0]["input_ids"][None]
    assert torch.equal(model(input_ids=ids).logits, llama.base(input_ids=ids).logits)


def test_w12_alone_has_gradients(opened):
    model, found, _ = opened
    own = {id(block) for blocks in found.values() for block in blocks}
    assert all((parameter.grad is not None) == (id(parameter) in own) for parameter in model.parameters())
    assert {len(blocks) for blocks in found.values()} == {7}


def test_the_gradient_is_that_of_the_mean_loss(opened):
    """Central differences along the gradient of one layer give the square of its norm."""
    model, found, energy = opened
    for layer, blocks in found.items():
        losses = []
        for length in (1e-2, -1e-2):
            with torch.no_grad(), stepped(blocks, length):
                losses.append(measure(model, text(), 8).nats_per_token)
        assert (losses[1] - losses[0]) / 2e-2 == pytest.approx(energy[layer], rel=0.02), layer


def test_a_step_keeps_its_promise_to_first_order(opened, monkeypatch):
    model, found, energy = opened
    monkeypatch.setattr(w12_worth, "PROMISED", 1e-3)
    before = measure(model, text(), 8).nats_per_token
    for layer, blocks in found.items():
        with torch.no_grad(), stepped(blocks, 1e-3 / energy[layer]):
            assert before - measure(model, text(), 8).nats_per_token == pytest.approx(1e-3, rel=0.1), layer
    assert measure(model, text(), 8).nats_per_token == before, "a step is taken back"


def test_divergence_is_measured_from_the_base_on_old_text(llama, opened):
    model, found, energy = opened
    ids = text(rows=2)
    divergence = measure_divergence(model, found, energy, spread_batches(ids, 1000, model), no_progress)
    rows = torch.stack([ids[row]["input_ids"] for row in range(2)])
    base = llama.base(input_ids=rows).logits[:, :-1].double().log_softmax(-1)
    for layer, blocks in found.items():
        with torch.no_grad(), stepped(blocks, PROMISED / energy[layer]):
            other = model(input_ids=rows).logits[:, :-1].double().log_softmax(-1)
        expected = (base.exp() * (base - other)).sum(-1).mean()
        assert divergence[layer] == pytest.approx(float(expected), rel=1e-3)


def test_worth_does_not_depend_on_what_is_promised(llama, monkeypatch):
    def worths(promised):
        monkeypatch.setattr(w12_worth, "PROMISED", promised)
        found = estimate_worth(
            open_checkpoint(llama.base_path), plan_of(llama.base_path), text(), text(), CPU, no_track
        )
        return [one.divergence for one in found], [one.worth for one in found]

    small, large = worths(0.005), worths(0.01)
    assert large[0] == pytest.approx([4 * divergence for divergence in small[0]], rel=0.1), "divergence is quadratic"
    assert large[1] == pytest.approx(small[1], rel=0.1)


def test_a_layer_that_reads_nothing_is_worth_nothing(llama, tmp_path):
    """With zero gains its norms hide the hidden state from its linears, base part and up part alike."""
    model = load(llama.base_path)
    with torch.no_grad():
        for norm in (model.model.layers[1].input_layernorm, model.model.layers[1].post_attention_layernorm):
            norm.weight.zero_()
        for part in model.model.layers[1].modules():
            if getattr(part, "bias", None) is not None:
                part.bias.zero_()
    model.save_pretrained(tmp_path)
    found = estimate_worth(open_checkpoint(tmp_path), plan_of(tmp_path), text(), text(), CPU, no_track)
    assert (found[1].gradient_energy, found[1].divergence, found[1].worth) == (0.0, 0.0, 0.0)
    assert all(one.worth > 0 for one in (found[0], found[2]))


def test_a_step_that_breaks_the_model_is_worth_next_to_nothing():
    assert worth(1e-30, float("inf")) == 0.0
    assert worth(0.0, 0.0) == 0.0
    assert worth(1.0, 2e-4) == pytest.approx(PROMISED**2 / 4e-4)


def test_text_is_taken_from_all_over(opened):
    model, _, _ = opened
    taken = spread_batches(text(rows=100), 48, model)
    rows = torch.cat([batch["input_ids"] for batch in taken])
    assert torch.equal(rows, torch.stack([text(rows=100)[row]["input_ids"] for row in (0, 25, 50, 75)]))
