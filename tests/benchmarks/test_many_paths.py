"""What many expansions cost: all choices are measured, ratios are those within a round, and targets can be missed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import many_paths


@pytest.mark.slow
def test_all_is_measured_and_written(tmp_path: Path) -> None:
    output = tmp_path / "numbers.json"
    options = ["--shape", "tiny", "--length", "16", "--prompt", "4", "--new-tokens", "2", "--paths", "1,2"]
    run = CliRunner().invoke(
        many_paths.main, [*options, "--rounds", "1", "-o", str(output)], catch_exceptions=False, terminal_width=80
    )
    assert run.exit_code == 0, run.output
    report = json.loads(output.read_text())
    choices = list(many_paths.choices_of([1, 2]))
    assert [row["choice"] for row in report["measured"]] == choices * 4
    weights = report["weights"]
    assert weights["base"] == 1 < weights["1 preserve"] == weights["alone"] < weights["2 preserve"]
    assert 2 * weights["alone"] - 1 == pytest.approx(weights["2 preserve"]), "the base once"
    counted = {row["choice"]: row["counted"] for row in report["measured"][: len(choices)]}
    assert counted["1 preserve"] < counted["1 adapt, upper half"] < counted["1 adapt"]
