"""Benchmarks of a real base run, here on the shipped model, and compare what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.real import samples, verify
from scale_surgery import Request, expand
from scale_surgery.biographies import SHIPPED_MODEL


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return expand(SHIPPED_MODEL, Request("last:1"), tmp_path_factory.mktemp("real") / "wide").path


def test_own_samples_beside_generate(wide: Path) -> None:
    ((work, ours, peer, ratio),) = samples.measure(SHIPPED_MODEL, wide, rows=4, tokens=8)
    assert work == "own samples, 4 texts of 8 tokens" and ours > 0 and peer > 0 and ratio == ours / peer


def test_verify_beside_its_floor(wide: Path) -> None:
    ((work, ours, floor, ratio),) = verify.measure(SHIPPED_MODEL, wide)
    assert work == "verify wide" and ratio == ours / floor
    assert ours > floor > 1, "the floor is a part of the command; imports alone take a second"
