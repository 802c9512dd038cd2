"""Norms, singular values and effective ranks against closed forms and torch's own decomposition."""

from __future__ import annotations

import math

import pytest
import torch

from scale_surgery.evidence import spectra
from scale_surgery.evidence.spectra import effective_rank, norm_of, singular_values


def random_matrix(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(7, 5), (5, 7), (6, 6), (1, 4)])
def test_singular_values_are_torch_s(shape: tuple[int, int]) -> None:
    matrix = random_matrix(*shape)
    expected = torch.linalg.svdvals(matrix.double())
    assert torch.allclose(singular_values(matrix), expected, rtol=1e-9)


def test_half_precision_is_not_computed_in_half_precision() -> None:
    matrix = random_matrix(40, 30).bfloat16()
    assert torch.allclose(singular_values(matrix), torch.linalg.svdvals(matrix.double()), rtol=1e-9)
    assert norm_of(matrix) == pytest.approx(float(matrix.double().norm()), rel=1e-12)


def test_a_norm_is_added_up_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = random_matrix(9, 11)
    monkeypatch.setattr(spectra, "CHUNK_ELEMENTS", 10)
    assert norm_of(matrix.T) == pytest.approx(float(matrix.double().norm()), rel=1e-12)
    assert norm_of(torch.zeros(3)) == 0 and math.isnan(norm_of(torch.tensor([1.0, math.nan])))


def test_effective_ranks_of_known_spectra() -> None:
    assert effective_rank(torch.ones(8)) == pytest.approx(8)
    assert effective_rank(torch.tensor([3.0, 0.0, 0.0])) == pytest.approx(1)
    # shares 2/3 and 1/3: exp(ln 3 - (2/3) ln 2)
    assert effective_rank(torch.tensor([2.0, 1.0])) == pytest.approx(3 / 2 ** (2 / 3))
    assert effective_rank(torch.zeros(3)) is None


def test_effective_rank_of_a_product_is_its_inner_width_at_most() -> None:
    low = random_matrix(30, 4) @ random_matrix(4, 20)
    found = effective_rank(singular_values(low))
    assert found is not None and 1 < found <= 4 + 1e-3
    full = effective_rank(singular_values(random_matrix(30, 20)))
    assert full is not None and full > 12
