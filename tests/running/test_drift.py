"""The drift of logits is the same whether tokens are compared at once or some at a time, and NaN is never rounding."""

from __future__ import annotations

import pytest
import torch

from scale_surgery.running import drift
from scale_surgery.running.prompts import Batch

MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


def compare(before: torch.Tensor, after: torch.Tensor) -> drift.LogitDrift:
    return drift.compare_logits(before, after, Batch(torch.zeros_like(MASK), MASK), "cpu")


def test_tokens_are_compared_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(2, 5, 11, generator=generator)
    after = before + 0.3 * torch.randn(2, 5, 11, generator=generator)
    real = MASK.bool()
    # padding does not count
    before[0, 0] = 1e6
    first, second = before[real].double(), after[real].double()
    divergence = torch.nn.functional.kl_div(
        second.log_softmax(-1), first.log_softmax(-1), reduction="batchmean", log_target=True
    )
    agreement = (first.argmax(-1) == second.argmax(-1)).double().mean()
    assert 0 < agreement < 1
    for logits in (2**22, 3 * 11, 1):
        monkeypatch.setattr(drift, "LOGITS_AT_ONCE", logits)
        compared = compare(before, after)
        assert (compared.prompts, compared.tokens, compared.is_bit_equal) == (2, 8, False)
        assert compared.drift == (first - second).abs().max() and compared.largest_logit == first.abs().max()
        assert compared.kl_divergence == pytest.approx(float(divergence), rel=1e-12)
        assert compared.top1_agreement == agreement
    assert compare(before, before).is_bit_equal


@pytest.mark.parametrize("place", [(0, 2), (1, 4)])
def test_nan_is_never_rounding(monkeypatch: pytest.MonkeyPatch, place: tuple[int, int]) -> None:
    monkeypatch.setattr(drift, "LOGITS_AT_ONCE", 1)
    before = torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(0))
    after = before.clone()
    after[place][3] = float("nan")
    compared = drift.Drift(**vars(compare(before, after)), tolerance=1e9, generation_agreement=None)
    assert not compared.holds and not compared.is_bit_equal
    # the base's side of a routed model is equal, whatever the other is
    for sides in ((compare(before, before), compare(before, after)), (compare(before, after), compare(before, before))):
        assert drift.worst(sides).drift != drift.worst(sides).drift, "NaN"
    after[place] = before[place]
    assert drift.Drift(**vars(compare(before, after)), tolerance=0, generation_agreement=None).holds
