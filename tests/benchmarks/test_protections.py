"""Ways of the field to protect what a base knows: each leaves alone what it says it leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.biography.methods import adapted, whole
from benchmarks.harness import stepping
from benchmarks.protections import between, knowledge_preserved, pulled, shielded, subspaced, without_intruders
from scale_surgery.biographies import SHIPPED_MODEL

STEPS = 8
ROWS = torch.randint(0, 500, (4, 32), generator=torch.Generator().manual_seed(0))


def learned(make: Callable[..., Any], rate: float = 1e-2) -> tuple[Any, dict[str, Tensor]]:
    """A model that has learned, and its tensors before."""
    model = make(SHIPPED_MODEL, 0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    take_step = stepping(model, rate, STEPS)
    for _ in range(STEPS):
        model(input_ids=ROWS, labels=ROWS).loss.backward()
        take_step()
    return model.eval(), before


def distance(model: Any, before: dict[str, Tensor]) -> float:
    return sum(float((tensor - before[name]).square().sum()) for name, tensor in model.state_dict().items()) ** 0.5


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=ROWS).logits


def test_a_pull_keeps_a_model_near_and_a_stronger_one_nearer() -> None:
    free, weak, strong = (
        distance(*learned(make)) for make in (whole, partial(pulled, weight=0.01), partial(pulled, weight=1.0))
    )

    assert strong < weak < free


def test_shielded_columns_stay_bit_for_bit_and_the_others_learn() -> None:
    model, before = learned(partial(shielded, samples=lambda model: ROWS))

    for name, module in model.model.named_modules():
        if isinstance(module, nn.Linear):
            is_same = (module.weight == before[f"model.{name}.weight"]).all(0)
            assert is_same.sum() == round(0.5 * module.in_features), name


@pytest.mark.parametrize(
    "make", [subspaced, partial(knowledge_preserved, rank=4, samples=lambda model: ROWS)], ids=["OSF", "CorDA"]
)
def test_training_begins_at_the_base_and_learns(make: Callable[..., Any]) -> None:
    base, start = logits(whole(SHIPPED_MODEL, 0)), make(SHIPPED_MODEL, 0)

    torch.testing.assert_close(logits(start), base, rtol=1e-3, atol=2e-3)
    assert not torch.allclose(logits(learned(make)[0]), base, atol=0.1)


def test_weights_on_the_way_begin_at_the_base_and_end_at_the_model() -> None:
    model, before = learned(whole)
    at = {share: between(share, whole, SHIPPED_MODEL, model) for share in (0.0, 0.5, 1.0)}

    assert all(torch.equal(tensor, before[name]) for name, tensor in at[0.0].state_dict().items())
    assert torch.equal(logits(at[1.0]), logits(model))
    assert distance(at[0.5], before) == pytest.approx(distance(model, before) / 2, rel=1e-3)


def test_reduced_intruders_change_an_adapter_and_not_the_model_that_has_it() -> None:
    model, _ = learned(partial(adapted, start=True, rank=4), rate=0.1)
    trained = logits(model)

    assert not torch.equal(logits(without_intruders(SHIPPED_MODEL, model)), trained)
    assert torch.equal(logits(model), trained)
