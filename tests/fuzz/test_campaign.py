"""The bounded part of the mutation campaign; `make fuzz` runs as many cases as are asked for, with any seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.campaign import findings
from tests.fuzz.case import run_case
from tests.fuzz.seeds import make_seeds

SEED, FEW, CASES = 1, 25, 80


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeds")
    make_seeds(folder)
    return folder


# what a mutated config makes transformers warn of is none of our business here
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cases", (FEW, pytest.param(CASES, marks=pytest.mark.slow)))
def test_nothing_is_found(seeds: Path, cases: int) -> None:
    outcomes = [run_case(seeds, SEED, number) for number in range(cases)]
    assert not [outcome for outcome in outcomes if outcome.outcome == "finding"], findings(outcomes, SEED)
    assert {outcome.outcome for outcome in outcomes} == {"refused", "accepted"}
