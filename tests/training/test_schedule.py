"""What `train` says of a run: how long it is, before the first step, and what the loss was before and after."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scale_surgery import EvalData, Request, RunOptions, TrainingSettings, TrainingStart, expand, train
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.errors import Problem
from scale_surgery.progress import Progress
from scale_surgery.running.loss import measure
from scale_surgery.running.tokenizer import need_tokenizer
from scale_surgery.show.tables import render_training
from scale_surgery.text.documents import read_documents
from scale_surgery.text.sequences import Sequences
from scale_surgery.text.tokenizing import pack, start_tokens, tokenize
from scale_surgery.training.arguments import training_schedule
from scale_surgery.training.result import LossChange, loss_warnings
from scale_surgery.training.settings import TrainingSchedule
from scale_surgery.training.train import MOST_SAMPLED, sample_of
from tests.command import run
from tests.conftest import digests, edited, load, problems, shown
from tests.training.test_train import stopping_at

CPU = RunOptions(device="cpu")
SETTINGS = TrainingSettings(steps=4, sequence_length=64, batch_size=4, save_every=2, learning_rate=3e-3, log_every=1)


def sequences(count: int, tokens: int) -> Sequences:
    flat = torch.ones(count * tokens, dtype=torch.int32)
    return Sequences(flat, flat, tuple(range(0, count * tokens + 1, tokens)))


@pytest.mark.parametrize(
    ("settings", "steps", "passes"),
    (
        ({}, 125, 1.0),
        ({"count": 1001}, 126, 1.0),
        ({"processes": 4}, 32, 1.0),
        ({"gradient_accumulation": 4, "epochs": 2.5}, 80, 2.5),
        ({"steps": 50}, 50, 0.4),
        # as the Trainer counts: the last step of a pass is a small one
        ({"count": 18, "steps": 60}, 60, 20.0),
        ({"count": 18, "steps": 60, "processes": 2, "batch_size": 2, "gradient_accumulation": 3}, 60, 30.0),
        ({"count": 18, "epochs": 0.5}, 2, 2 / 3),
        ({"steps": 50, "processes": 2, "batch_size": 4, "gradient_accumulation": 3}, 50, 50 / 42),
    ),
)
def test_steps_and_passes_are_counted(settings: dict[str, Any], steps: int, passes: float) -> None:
    count, processes = settings.pop("count", 1000), settings.pop("processes", 1)
    schedule = training_schedule(TrainingSettings(**settings), sequences(count, 64), processes)
    assert (schedule.steps, schedule.passes) == (steps, pytest.approx(passes))
    assert (schedule.sequences, schedule.tokens) == (count, 63 * count), "the first token of each is not predicted"


def test_the_warm_up_is_rounded_up_and_leaves_a_step() -> None:
    def rising(steps: int, warmup: float | None) -> int:
        return training_schedule(TrainingSettings(steps=steps, warmup=warmup), sequences(8, 8), 1).warmup_steps

    assert [rising(*case) for case in ((100, 0.06), (10, 0.06), (10, 0.0), (1, 0.06), (2, 0.9))] == [6, 1, 0, 0, 1]
    # by default at least ten steps, also where a run has fewer
    assert [rising(steps, None) for steps in (1, 2, 3, 15, 20, 100, 1000)] == [0, 10, 10, 10, 10, 10, 60]


def test_a_run_that_ends_in_its_warm_up_says_the_rate_that_it_reaches() -> None:
    def rate(steps: int, **settings: float) -> float | None:
        chosen = TrainingSettings(steps=steps, learning_rate=0.01, **settings)
        return training_schedule(chosen, sequences(8, 8), 1).learning_rate

    # the first step has a rate of 0, so the third has two tenths
    assert [rate(steps) for steps in (1, 3, 10, 11, 12, 100)] == [0.01, 0.002, 0.009, 0.01, 0.01, 0.01]
    assert rate(3, warmup=0.0) == rate(3, warmup=0.5) == 0.01


@pytest.mark.parametrize(
    ("before", "after", "warning"),
    ((3.0, 2.9, ""), (3.0, 2.99, "hardly fell, from 3.0000 to 2.9900. Train for more steps"), (3.0, 3.2, "rose, from")),
)
def test_a_loss_that_did_not_fall_is_said(before: float, after: float, warning: str) -> None:
    warnings = loss_warnings(LossChange("text", 8, before, after))
    assert (warning in warnings[0]) if warning else warnings == ()
    assert loss_warnings(None) == loss_warnings(LossChange("text", 8, None, after)) == ()


def nats_of(folder: Path, texts: Path, length: int) -> float:
    """Loss of a model on all windows of a text, without the Trainer."""
    tokenizer = need_tokenizer(folder, "wide", CPU)
    windows = pack(tokenize(read_documents([texts]), tokenizer), length, start_tokens(tokenizer))
    return measure(load(folder), windows, 3).nats_per_token


@pytest.mark.slow
def test_the_loss_before_and_after_is_that_of_the_folders(place: Path, tmp_path: Path) -> None:
    events: list[tuple[str, Any]] = []

    @contextmanager
    def track(label: str, total: int) -> Iterator[Progress]:
        events.append(("track", label))
        yield lambda advance, note="": None

    start = TrainingStart(announce=lambda schedule: events.append(("schedule", schedule)))
    settings = replace(SETTINGS, steps=40, save_every=20)
    texts = place / "texts.jsonl"
    done = train(place / "adapt", [texts], tmp_path / "made", settings, start=start, run=CPU, track=track)
    # after the bars of reading and copying, and before the first step
    assert events[-2:] == [("schedule", done.schedule), ("track", "training")]
    assert [name for name, _ in events].count("schedule") == 1 and isinstance(done.schedule, TrainingSchedule)
    assert done.change is not None and done.change.text == "text" and done.change.before is not None
    assert done.change.sequences == done.schedule.sequences, "a small text is measured whole"
    assert done.change.before == pytest.approx(nats_of(place / "adapt", texts, 64), abs=1e-5)
    assert done.change.after == pytest.approx(nats_of(done.path, texts, 64), abs=1e-5)
    assert done.change.after < done.change.before - 0.1
    assert done.warnings == ()


def test_new_text_is_what_is_compared_where_there_is_some(place: Path, tmp_path: Path) -> None:
    new = EvalData(new=[place / "word.txt"])
    done = train(place / "adapt", [place / "texts.jsonl"], tmp_path / "made", SETTINGS, eval_data=new, run=CPU)
    entries = [json.loads(line) for line in done.log.read_text().splitlines()]
    losses = [entry["new_nats_per_token"] for entry in entries if "new_nats_per_token" in entry]
    assert done.change == LossChange("new", 1, losses[0], losses[-1]) and len(losses) == 5


def sampled(count: int, processes: int = 1, **settings: Any) -> int:
    """How many of so many sequences are measured."""
    learned, chosen = sequences(count, 8), TrainingSettings(**settings)
    return len(sample_of(learned, training_schedule(chosen, learned, processes)))


@pytest.mark.slow
def test_a_measurement_changes_nothing_of_what_is_learned(place: Path, tmp_path: Path) -> None:
    """Neither numbers nor chance: with dropout, each step draws its own."""
    base = Path(shutil.copytree(SHIPPED_MODEL, tmp_path / "base"))
    with edited(base / "config.json") as config:
        config["attention_dropout"] = 0.2
    expand(base, Request("2-3", variant="adapt", collaborate="both"), tmp_path / "drops")
    often = EvalData(old=[place / "word.txt"], new=[place / "texts.jsonl"])
    runs = {
        "ends": train(tmp_path / "drops", [place / "texts.jsonl"], tmp_path / "ends", SETTINGS, run=CPU),
        "often": train(
            tmp_path / "drops", [place / "texts.jsonl"], tmp_path / "often", replace(SETTINGS, eval_every=1),
            eval_data=often, run=CPU,
        ),
        "plain": train(place / "adapt", [place / "texts.jsonl"], tmp_path / "plain", SETTINGS, run=CPU),
    }  # fmt: skip
    (ends, measured), (often_losses, often_measured), (plain, _) = (losses_of(done.log) for done in runs.values())
    assert (measured, often_measured) == (2, 5)
    assert ends == often_losses and ends != plain, "and the control: dropout is on"
    ends_digests, often_digests = (digests(tmp_path / name) for name in ("ends", "often"))
    shards = [name for name in ends_digests if name.startswith("expansion-")]
    assert shards and [ends_digests[name] for name in shards] == [often_digests[name] for name in shards]


@pytest.mark.parametrize("length", ({"steps": 4}, {"epochs": 1.0}, {"epochs": 0.25}))
def test_the_sample_is_the_same_however_a_step_is_shared_and_has_its_bounds(length: dict[str, Any]) -> None:
    alone = sampled(32, batch_size=4, **length)
    assert alone == 4, "no fewer than one step reads"
    assert sampled(32, processes=2, batch_size=2, **length) == alone
    assert sampled(32, batch_size=1, gradient_accumulation=4, **length) == alone
    assert sampled(32, processes=2, batch_size=4, **length) == 8, "the control: a larger step"
    assert sampled(200, batch_size=2, steps=50) == 10, "a tenth of what is read"
    assert sampled(3, batch_size=8, epochs=0.1) == sampled(3, batch_size=8, steps=50) == 3, "no fewer than a step"
    assert sampled(5000, batch_size=8) == MOST_SAMPLED


def losses_of(log: Path) -> tuple[list[float], int]:
    """The loss of each step, and how often something was measured."""
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    measured = [entry for entry in entries if any(key.endswith("_nats_per_token") for key in entry)]
    return [entry["loss"] for entry in entries if "loss" in entry], len(measured)


@pytest.mark.slow
def test_a_resumed_run_knows_the_loss_before_and_draws_once(place: Path, tmp_path: Path) -> None:
    whole = train(place / "adapt", [place / "texts.jsonl"], tmp_path / "whole", SETTINGS, run=CPU)
    target = tmp_path / "made"
    (found,) = problems(
        train, place / "adapt", [place / "texts.jsonl"], target, SETTINGS, run=CPU, track=stopping_at(3)
    )
    assert found == Problem("training-interrupted", target, step=3, kept=2)
    assert not (target / "training" / "curves.png").exists(), "drawn at the end, not at every checkpoint"
    resumed = TrainingStart(resume=True)
    done = train(place / "adapt", [place / "texts.jsonl"], target, SETTINGS, start=resumed, run=CPU)
    assert done.change == whole.change is not None and done.curves.exists()
    assert (whole.resumed, done.resumed, done.steps) == (0, 2, SETTINGS.steps)
    assert f"{SETTINGS.steps}, {SETTINGS.steps - 2} of them in " in shown(render_training(done))


def test_a_text_that_is_learned_and_measured_is_warned_of(place: Path, tmp_path: Path) -> None:
    texts, settings = [place / "texts.jsonl"], replace(SETTINGS, steps=1)
    sides = EvalData(old=[place / "texts.jsonl"], new=[place / "word.txt"])
    done = train(place / "adapt", texts, tmp_path / "made", settings, eval_data=sides, run=CPU)
    (warning,) = done.warnings[:1]
    assert warning.startswith(f"{texts[0]} is measured, and --data has it too")
    assert not [line for line in done.warnings if "word.txt" in line]


def test_the_console_says_it_in_80_columns_and_ends_with_next(place: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    command = ["train", place / "adapt", "--data", place / "word.txt", "-o", made, "--learning-rate", "1e-9"]
    result = run(*command)
    text = " ".join(result.stdout.split())
    assert text.startswith("to train texts 1 sequence, 5 tokens to learn, read once steps 1,")
    before, after = text.split(" trained written ")
    assert "warning" not in before
    assert (
        "(nats per token, 1 sequence to learn)" in after and "warning: the loss on the texts to learn hardly" in after
    )
    assert (
        f"next scale-surgery verify {made}".replace(" ", "") in result.stdout.replace("\n", "").replace(" ", "")[-300:]
    )
    assert "{'" not in result.output, "dictionaries of the Trainer"
    quiet = run(*command, "--overwrite", "-q")
    assert quiet.stdout.startswith("trained") and "warning" not in quiet.output


def test_one_step_alone_learns(place: Path, tmp_path: Path) -> None:
    """Where the learning rate rises, the first step has a rate of 0: one alone would change nothing."""
    done = train(place / "adapt", [place / "word.txt"], tmp_path / "made", TrainingSettings(), run=CPU)
    assert (done.steps, done.schedule.warmup_steps) == (1, 0)
    assert done.change is not None and done.change.before is not None and done.change.after < done.change.before
