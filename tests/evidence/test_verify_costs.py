"""Verification runs each model once, and what it leaves out or takes another way finds the same faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from scale_surgery import Probes, Request, RunOptions, expand, verify
from scale_surgery.evidence import hostile_texts, probes
from scale_surgery.evidence.probes import forecast, run_model
from scale_surgery.folder.record import read_manifest
from scale_surgery.planning.architecture import Sizes
from scale_surgery.running.drift import compare_logits, largest_difference
from scale_surgery.running.prompts import Batch
from scale_surgery.show.log_lines import LogLines
from tests.conftest import edited, load
from tests.routed import random_ids
from tests.tiny import save_tiny


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny expansion."""
    folder = tmp_path_factory.mktemp("costs")
    return expand(save_tiny(folder / "base", "llama"), Request("1-2"), folder / "wide").path


@pytest.fixture
def batch() -> Batch:
    """Three prompts: of four, nine and six tokens."""
    mask = torch.tensor([[0] * 5 + [1] * 4, [1] * 9, [0] * 3 + [1] * 6])
    return Batch(random_ids(3, 9) * mask, mask)


def test_two_prompts_are_the_longest_and_the_shortest(batch: Batch) -> None:
    two = batch.two()
    assert two.mask.sum(1).tolist() == [9, 4] and torch.equal(two.ids, batch.ids[[1, 0]])
    one = Batch(batch.ids[:1], batch.mask[:1]).two()
    assert torch.equal(one.ids[0], one.ids[1]), "of one prompt both are that"


# continuations


class Calls(list[tuple[int, bool]]):
    """Tokens that each forward of a model read, and whether it had a KV cache; can spoil some of the logits."""

    def __init__(self, model: Any, *, spoils_cached: bool | None = None) -> None:
        super().__init__()
        forward = model.forward

        def watched(*args: Any, **options: Any) -> Any:
            is_cached = bool(options.get("use_cache"))
            self.append((options["input_ids"].numel(), is_cached))
            output = forward(*args, **options)
            # the first one is no part of a continuation
            if len(self) > 1 and is_cached is spoils_cached:
                output.logits = output.logits.roll(1, -1)
            return output

        model.forward = watched


def sizes(made: Path) -> Sizes:
    return read_manifest(made).first_plan.sizes


def test_few_tokens_are_written_without_a_cache(made: Path, batch: Batch) -> None:
    model = load(made)
    calls = Calls(model)
    run = run_model(model, batch, sizes(made), 6, "cpu")
    assert run.cached is not None and run.cached.shape == (3, 15)
    assert run.uncached is not None and run.uncached.shape == (2, 11)
    # the probes, six steps of one token a prompt but the first, and two of the two prompts
    assert calls == [(27, False), (27, True), *[(3, True)] * 5, (18, False), (20, False)]
    calls.clear()
    assert run_model(model, batch, sizes(made), 0, "cpu").cached is None and calls == [(27, False)]


@pytest.mark.parametrize("spoils_cached", [True, False])
def test_a_fault_of_generation_alone_is_found(made: Path, batch: Batch, spoils_cached: bool) -> None:
    """With a KV cache or without it; logits of the prompts are the same."""
    whole, spoiled = load(made), load(made)
    Calls(spoiled, spoils_cached=spoils_cached)
    right, wrong = (run_model(model, batch, sizes(made), 4, "cpu") for model in (whole, spoiled))
    assert torch.equal(right.logits, wrong.logits)
    assert (probes._same_tokens(right.cached, wrong.cached), probes._same_tokens(right.uncached, wrong.uncached)) == (
        not spoils_cached,
        spoils_cached,
    )


def test_a_fault_of_generation_alone_breaks_the_promise(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verify(made, record=False).passed, "the control"
    monkeypatch.setattr(probes, "_same_tokens", lambda *_: False)
    found = verify(made, record=False)
    (promise,) = [promise for promise in found.promises if promise.name == "output_at_init"]
    assert not found.passed and promise.problems == ("greedy continuation differs, with or without KV cache.",)


# numbers


def test_equal_logits_are_compared_as_others_are(batch: Batch) -> None:
    first = torch.randn(3, 9, 50, generator=torch.Generator().manual_seed(0))
    second = first + 0.1 * torch.randn(3, 9, 50, generator=torch.Generator().manual_seed(1))
    real = batch.mask.bool()
    before, after = (logits[real].double().log_softmax(-1) for logits in (first, second))
    compared = compare_logits(first, second, batch, "cpu")
    expected = float((before.exp() * (before - after)).sum(-1).mean())
    assert compared.kl_divergence == pytest.approx(expected, rel=1e-12) and compared.kl_divergence > 1e-3
    assert compared.drift == float((first[real].double() - second[real].double()).abs().max())
    assert not compared.is_bit_equal and compared.top1_agreement < 1
    same = compare_logits(first, first.clone(), batch, "cpu")
    assert same.is_bit_equal and (same.drift, same.kl_divergence, same.top1_agreement) == (0.0, 0.0, 1.0)
    # padding does not count, and NaN equals nothing
    first[0, 0] = float("nan")
    assert compare_logits(first, first, batch, "cpu").is_bit_equal
    first[1, 0, 0] = float("nan")
    spoiled = compare_logits(first, first, batch, "cpu")
    assert not spoiled.is_bit_equal and spoiled.drift != spoiled.drift
    assert largest_difference(first, first) != largest_difference(first, first)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-12), (torch.bfloat16, 1e-4)])
def test_losses_of_hostile_texts(batch: Batch, dtype: torch.dtype, most: float) -> None:
    logits = (5 * torch.randn(3, 9, 1000, generator=torch.Generator().manual_seed(0))).to(dtype)
    scores = logits[:, :-1].double().log_softmax(-1)
    expected = -scores.gather(-1, batch.ids[:, 1:, None]).squeeze(-1).masked_fill(batch.mask[:, :-1] == 0, 0).sum(-1)
    losses = hostile_texts._losses(logits, batch.ids, batch.mask)
    assert losses.dtype == torch.float64 and (losses - expected).abs().max() <= most and losses.min() > 10


# the forecast


def test_a_large_model_s_probes_are_forecast(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    verify(made, track=LogLines(lines.append).track, record=False)
    assert lines == [], "the control: what takes a second is not"
    monkeypatch.setattr(probes, "LARGE", 0)
    verify(made, track=LogLines(lines.append).track, record=False)
    (line,) = lines
    assert "2 models read " in line and " prompts for 8 tokens; cheaper: --max-new-tokens 0 writes no token, " in line
    assert line.endswith("--files-only runs no model")


def test_the_forecast_names_what_is_cheaper(batch: Batch) -> None:
    whole, read = (forecast(2, batch, Probes(max_new_tokens=count)) for count in (8, 0))
    assert whole == (
        "2 models read 19 tokens and go on with 3 prompts for 8 tokens; cheaper: --max-new-tokens 0 writes no token, "
        "--files-only runs no model"
    )
    assert whole.kept == "cheaper: --max-new-tokens 0, --files-only"
    assert read == "2 models read 19 tokens; cheaper: --files-only runs no model"


def test_a_fault_of_the_written_config_is_still_found(made: Path) -> None:
    """Its logits are others: the control of a comparison that stops at equal bits."""
    with edited(made / "config.json") as config:
        before = config["rms_norm_eps"]
        config["rms_norm_eps"] = 0.5
    result = verify(made, run=RunOptions(trust_remote_code=True), record=False)
    with edited(made / "config.json") as config:
        config["rms_norm_eps"] = before
    assert not result.passed and result.numbers is not None
    assert not result.numbers.is_bit_equal and result.numbers.drift > 0 and result.numbers.kl_divergence > 0
