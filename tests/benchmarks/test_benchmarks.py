"""The benchmarks run, on shapes that take no time, and measure what they say."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner

from benchmarks import make_checkpoint, pipeline, svd
from scale_surgery.checkpoint.folder import open_checkpoint

TINY = make_checkpoint.SHAPES["tiny"]


def make_tiny(folder: Path, **options: object) -> Path:
    make_checkpoint.make_checkpoint(folder, TINY, shard_bytes=200_000, **options)
    return folder


def test_random_checkpoint_is_one_that_transformers_loads(tmp_path: Path) -> None:
    base = make_tiny(tmp_path / "base")
    assert len(open_checkpoint(base).shards) == 3
    model, info = transformers.AutoModelForCausalLM.from_pretrained(base, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight.float().std().item() == pytest.approx(make_checkpoint.SPREAD, rel=0.02)
    assert pipeline.is_same_folder(base, make_tiny(tmp_path / "again"))
    assert not pipeline.is_same_folder(base, make_tiny(tmp_path / "other", seed=1))
    holes = make_tiny(tmp_path / "holes", holes=True)
    assert open_checkpoint(holes).tensors == open_checkpoint(base).tensors


def test_measure_sees_memory_and_bytes_written(tmp_path: Path) -> None:
    program = f"""
import json, os, time
held = bytearray(os.urandom(50_000_000))
with open({str(tmp_path / "file")!r}, "wb") as stream:
    stream.write(held[:3_000_000])
    os.fsync(stream.fileno())
time.sleep(0.2)
print(json.dumps({{"done": True}}))
"""
    measurement = pipeline.measure([sys.executable, "-c", program], "name")
    assert (measurement.exit_code, measurement.result) == (0, {"done": True})
    assert measurement.seconds > 0.2
    assert 50_000_000 < measurement.peak_anonymous_bytes < 200_000_000
    assert measurement.peak_rss_bytes >= measurement.peak_anonymous_bytes


def test_new_bytes_leaves_out_hard_links_only(tmp_path: Path) -> None:
    base, made = make_tiny(tmp_path / "base"), tmp_path / "made"
    made.mkdir()
    shard = "model-00001-of-00003.safetensors"
    os.link(base / shard, made / shard)
    assert pipeline.new_bytes(made, base) == 0
    shutil.copy(base / shard, made / "copy.safetensors")
    assert pipeline.new_bytes(made, base) == (base / shard).stat().st_size


@pytest.mark.slow  # three processes that import torch; how one is measured is tested above
def test_pipeline_measures_reports_and_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, work, output = make_tiny(tmp_path / "base"), tmp_path / "work", tmp_path / "numbers.json"
    every = pipeline.commands
    # what runs models is left out, it takes long to start
    short = lambda *given: {name: every(*given)[name] for name in ("plan", "expand", "strip")}  # noqa: E731
    monkeypatch.setattr(pipeline, "commands", short)
    options = ["--model", str(base), "--work", str(work), "--layers", "2-3", "--cold", "-o", str(output)]
    run = CliRunner().invoke(pipeline.main, options, catch_exceptions=False)
    assert run.exit_code == 0, run.output
    assert not work.exists()
    assert base.exists()
    report = json.loads(output.read_text())
    assert report["is_same"]
    plan, expand, strip = report["measurements"]
    assert [step["exit_code"] for step in (plan, expand, strip)] == [0, 0, 0]
    added = plan["result"]["costs"]["bytes_added"]
    assert added < expand["new_bytes"] < added + 250_000  # and no base shard: they have 435,328 bytes


def test_pipeline_stops_at_a_failure(tmp_path: Path) -> None:
    steps = {"bad": (["plan", str(tmp_path / "nothing"), "--layers", "all"], None), "never": ([], None)}
    (measurement,) = pipeline.run_steps(steps, tmp_path, tmp_path, is_cold=False)
    assert measurement.exit_code == 1


@pytest.mark.parametrize("sizes", [(64, 96, 8), (96, 64, 8), (200, 200, 8)])
def test_exact_and_fast_find_a_well_defined_subspace(sizes: tuple[int, int, int]) -> None:
    comparison = svd.compare("any", "gap", sizes)
    for method in svd.METHODS:
        assert comparison.agreement[method].overlap > 0.9999
        assert comparison.agreement[method].energy == pytest.approx(1, abs=1e-4)


def test_agreement_tells_a_wrong_subspace() -> None:
    agreement = svd.agree(torch.eye(6), torch.eye(6)[:2], torch.eye(6)[1:3])
    assert (agreement.overlap, agreement.angle) == pytest.approx((0.5, 90.0))
