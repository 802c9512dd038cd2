"""The benchmark of learning rates: a run that diverged is said, and no run is repeated."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from benchmarks import rates


def test_runs_are_measured_once(tmp_path: Path) -> None:
    kept = tmp_path / "rates.jsonl"
    words = "--way adapt --times 1 --times 1e33 --steps 4 --batch 2 --held-out 2 --layers last:1 -o"
    first = CliRunner().invoke(rates.main, [*words.split(), str(kept)], catch_exceptions=False).output.splitlines()
    lines = kept.read_bytes()
    assert first[-1] == "| biographies | adapt | 2.8e+30 | 1e+33 | | diverged |"
    *_, before, after, _ = first[-2].split("|")
    assert float(after) < float(before)
    again = CliRunner().invoke(rates.main, [*words.split(), str(kept)], catch_exceptions=False).output.splitlines()
    assert again == first and kept.read_bytes() == lines and lines.count(b"\n") == 2
