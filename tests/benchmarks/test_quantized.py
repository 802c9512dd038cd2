"""The benchmark of training on quantised bases runs on a tiny shape, and what it says of memory can fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import quantized


@pytest.mark.slow
def test_all_methods_are_measured_on_each_kind_of_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bitsandbytes")
    # processes of their own take seconds to start; the benchmark of training steps measures one peak
    monkeypatch.setattr(quantized, "measure_peaks", lambda *_: [1] * len(quantized.VARIANTS))
    output = tmp_path / "numbers.json"
    options = ["--shape", "tiny", "--batch", "2", "--length", "16", "--rounds", "1", "--threads", "1"]
    run = CliRunner().invoke(quantized.main, [*options, "-o", str(output)], catch_exceptions=False)
    assert run.exit_code == 0, run.output
    report = json.loads(output.read_text())
    costs = {(cost["kind"], cost["method"]): cost for cost in report["costs"]}
    assert tuple(costs) == quantized.VARIANTS
    assert all(cost["seconds"][0] > 0 for cost in costs.values())
    for method in quantized.METHODS:
        stored, int8, nf4 = (costs[kind, method]["base_bytes"] for kind in quantized.KINDS)
        assert stored > int8 > nf4
    assert len({costs[kind, "preserve"]["trained_parameters"] for kind in quantized.KINDS}) == 1
    rows = dict(zip(quantized.VARIANTS, report["ratios"], strict=True))
    assert rows["nf4", "LoRA"]["x LoRA"] == rows["stored", "preserve"]["x stored"] == 1
