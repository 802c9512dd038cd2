"""The forecast of training memory: what makes it grow, and what does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from scale_surgery import Request, TrainingSettings, plan
from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.running.pieces import LOGITS_AT_ONCE
from scale_surgery.training.arguments import Precision
from scale_surgery.training.memory import (
    LOGIT_BYTES,
    ROUTED_LOGIT_BYTES,
    TRAINED_BYTES,
    forecast_measuring,
    forecast_memory,
)
from tests.tiny import save_tiny


def test_what_a_run_takes(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "llama", vocab_size=64_000)
    checkpoint, settings = open_checkpoint(base), TrainingSettings(batch_size=8)
    adapt, preserve = (plan(base, Request("2", variant=variant)) for variant in ("adapt", "preserve"))
    few = Precision(bf16=False)

    def forecast(of=adapt, trained=0, options=settings, precision=few, length=256) -> int:
        return forecast_memory(of, checkpoint, trained, options, precision, length)

    assert forecast(trained=10**6) - forecast() == TRAINED_BYTES * 10**6
    stored = sum(info.bytes for info in checkpoint.tensors.values())
    assert forecast(precision=Precision(bf16=False, widens=True)) - forecast() == stored
    assert forecast(preserve) < forecast(), "no gradient passes through the base stream"
    assert forecast(plan(base, Request("0", variant="adapt"))) > forecast(), "lower layers keep more"
    low = plan(base, Request("0", variant="adapt"))
    assert forecast(low, options=replace(settings, gradient_checkpointing=True)) < forecast(low)
    # the up stream passes through all expanded layers, whichever of them W12 is in
    high = plan(base, Request("all", variant="adapt", collaborative_layers="-1"))
    assert forecast(plan(base, Request("all"))) < forecast(high) < forecast(plan(base, Request("all", variant="adapt")))
    deep = plan(base, Request("all", method="depth"))
    assert forecast(deep) > forecast(plan(base, Request("all", variant="adapt"))), "twice as many layers"
    # logits stand in memory a piece at a time
    whole = LOGIT_BYTES * 8 * 256 * 64_000
    assert forecast(length=512) - forecast() < LOGIT_BYTES * LOGITS_AT_ONCE < whole * 2 / 3


def test_what_measuring_takes(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "llama", vocab_size=64_000)
    planned, checkpoint = plan(base, Request("2", variant="adapt")), open_checkpoint(base)
    one, ten, thousands = (forecast_measuring(planned, checkpoint, tokens) for tokens in (1, 10, 10_000))
    assert ten - one == 9 * 64_000 * ROUTED_LOGIT_BYTES
    assert thousands - one == (LOGITS_AT_ONCE - 64_000) * ROUTED_LOGIT_BYTES, "a piece at a time"
