"""Scores of updates, budgets, and the choice of layers, on numbers that are known."""

from __future__ import annotations

import math

import pytest
import torch

from scale_surgery.errors import PlanError
from scale_surgery.training.budget import check_budget, choose_layers, read_budget
from scale_surgery.training.ranking import LayerScore, order_layers, propose_collaboration
from scale_surgery.training.update_scores import effective_rank, measure_update, relative_norm


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_effective_rank_of_one_direction_is_one_and_of_equal_ones_their_number():
    start = random(12, 7)
    outer = torch.outer(random(12, seed=1), random(7, seed=2))
    assert effective_rank([measure_update(start, start + outer)]) == pytest.approx(1.0, abs=1e-3)
    rotation = torch.linalg.qr(random(7, 7, seed=3)).Q
    zeros = torch.zeros(7, 7)
    assert effective_rank([measure_update(zeros, 0.1 * rotation)]) == pytest.approx(7.0, rel=1e-6)


def test_effective_rank_is_that_of_the_literature_on_known_singular_values():
    values = torch.tensor([4.0, 2.0, 1.0, 1.0], dtype=torch.float64)
    left, right = (torch.linalg.qr(random(9, 4, seed=seed).double()).Q for seed in (4, 5))
    update = measure_update(torch.zeros(9, 9, dtype=torch.float64), left @ values.diag() @ right.T)
    # p = 1/2, 1/4, 1/8, 1/8: entropy 1.75 bits
    assert effective_rank([update]) == pytest.approx(2**1.75, rel=1e-6)
    assert relative_norm([update]) == math.inf, "matrices of zeros changed"


def test_scores_of_several_matrices_are_those_of_the_block_diagonal_matrix():
    before = [random(6, 5), 3 * random(4, 9, seed=1)]
    after = [old + 0.1 * random(*old.shape, seed=7) for old in before]
    together = [measure_update(old, new) for old, new in zip(before, after, strict=True)]
    joined = torch.block_diag(*after) - torch.block_diag(*before)
    values = torch.linalg.svdvals(joined.double())
    shares = values[values > 1e-12] / values.sum()
    assert effective_rank(together) == pytest.approx(float((-(shares * shares.log()).sum()).exp()), rel=1e-5)
    expected = float(joined.norm() / torch.block_diag(*before).norm())
    assert relative_norm(together) == pytest.approx(expected, rel=1e-5)
    assert relative_norm(together[:1]) != pytest.approx(expected, rel=1e-2)


def test_what_did_not_change_scores_zero():
    start = random(5, 5)
    update = measure_update(start, start.clone())
    assert (relative_norm([update]), effective_rank([update])) == (0.0, 0.0)
    assert relative_norm([measure_update(0 * start, 0 * start)]) == 0.0


def test_an_update_smaller_than_the_numbers_of_the_base_is_seen():
    start = random(8, 8).bfloat16()
    after = start.float() * (1 + 1e-4)
    assert torch.equal(after.bfloat16(), start), "it would be lost in bfloat16"
    assert relative_norm([measure_update(start, after)]) == pytest.approx(1e-4, rel=0.01)


@pytest.mark.parametrize(
    ("text", "parameters"),
    [
        ("30%", 300),
        ("12.5 %", 125),
        ("150%", 1500),
        ("200", 200),
        ("2k", 2000),
        ("1.5M", 1_500_000),
        ("2B", 2 * 10**9),
        ("1_000", 1000),
    ],
)
def test_budgets(text, parameters):
    assert read_budget(text, 1000) == parameters


@pytest.mark.parametrize("text", ["", "many", "-5%", "0", "0%", "30 percent", "1e6", "%", "nan", "inf", "3T"])
def test_a_budget_that_cannot_be_read(text):
    expected = f"--budget is {text!r}, expected a number of parameters above zero: 30%, or 200M (also k and B)."
    with pytest.raises(PlanError) as caught:
        read_budget(text, 1000)
    assert str(caught.value) == expected


def price(layers: list[int]) -> int:
    """Ten for a layer, five for what stands outside the layers, and a hundred more for the embedding."""
    return 10 * len(layers) + 5 + 100 * (0 in layers)


def test_the_best_layers_that_a_budget_pays_for():
    assert choose_layers(25, [3, 1, 2], price) == (1, 3)
    assert choose_layers(34, [3, 1, 2], price) == (1, 3), "what stands outside the layers counts too"
    assert choose_layers(35, [3, 1, 2], price) == (1, 2, 3)
    assert choose_layers(1000, [3, 0, 1, 2], price) == (0, 1, 2, 3)


def test_a_layer_that_does_not_fit_is_passed_over():
    assert choose_layers(25, [0, 3, 1], price) == (1, 3)


def test_a_budget_that_fits_no_layer():
    check_budget(15, [0, 1, 2], price, "15")
    with pytest.raises(PlanError) as caught:
        check_budget(14, [0, 1, 2], price, "1%")
    assert str(caught.value) == (
        "--budget 1% is 14 parameters, expected at least 15, what layer 1 alone costs with what is added outside the "
        "layers. Raise it; with --method scale, a smaller --ratio makes layers cheaper."
    )


def layer(number: int, norm: float, rank: float) -> LayerScore:
    return LayerScore(number, norm, rank, 1.0, {}, {})


def test_order_and_ties():
    layers = [layer(0, 0.2, 1.0), layer(1, 0.1, 3.0), layer(2, 0.2, 2.0)]
    assert order_layers(layers, "relative-norm") == (2, 0, 1), "of equal ones the higher layer"
    assert order_layers(layers, "effective-rank") == (1, 2, 0)


def test_collaborative_layers_are_the_fewest_highest_ones_with_most_of_the_worth():
    worth = {0: 1.0, 1: 1.0, 2: 3.0, 3: 5.0}
    assert propose_collaboration(worth, (0, 1, 2, 3)) == (2, 3)
    assert propose_collaboration(worth | {0: 100.0}, (0, 1, 2, 3)) == (0, 1, 2, 3)
    assert propose_collaboration(worth | {0: 100.0}, (1, 2, 3)) == (2, 3), "only the chosen layers count"
    assert propose_collaboration(worth | {3: 100.0}, (0, 1, 2, 3)) == (3,)
    assert propose_collaboration(dict.fromkeys(range(4), 0.0), (1, 3)) == (1, 3)
