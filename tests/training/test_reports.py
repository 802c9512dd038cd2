"""Reports: the log goes where the Trainer's own callbacks put it, on resume too, and no command stumbles over it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scale_surgery import (
    EvalData,
    Training,
    TrainingError,
    TrainingSettings,
    TrainingStart,
    adopt,
    extract,
    inspect,
    merge,
    route_export,
    strip,
    train,
    verify,
)
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.errors import Problem
from scale_surgery.training.reports import find_reports
from tests import command
from tests.conftest import digests, load, problems, refused
from tests.each import mostly
from tests.training.test_train import stopping_at

pytest.importorskip("tensorboard", reason="the test extra installs it")

SETTINGS = TrainingSettings(
    steps=7, save_every=2, eval_every=3, sequence_length=32, batch_size=2, learning_rate=3e-3, log_every=1
)
TO_BOARD = TrainingStart(report_to=("tensorboard",))


def run(place: Path, output: Path, start: TrainingStart = TO_BOARD, **options: Any) -> Training:
    sides = EvalData(old=[place / "old.jsonl"])
    return train(place / "adapt", [place / "texts.jsonl"], output, SETTINGS, eval_data=sides, start=start, **options)


@pytest.fixture(scope="module")
def reported(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Training:
    return run(place, tmp_path_factory.mktemp("reported") / "out")


def read_board(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {
        name: [(event.step, event.value) for event in accumulator.Scalars(name)]
        for name in accumulator.Tags()["scalars"]
    }


def logged(done: Training, name: str) -> list[tuple[int, float]]:
    entries = [json.loads(line) for line in done.log.read_text().splitlines()]
    return [(entry["step"], pytest.approx(entry[name])) for entry in entries if name in entry]


NAMES = ("loss", "learning_rate", "grad_norm", "old_nats_per_token", "forgetting", "text_nats_per_token")


@pytest.mark.slow
def test_tensorboard_shows_what_the_log_says(reported: Training) -> None:
    shown = read_board(reported.path / "training" / "runs")
    for name in NAMES:
        assert shown[f"train/{name}"] == logged(reported, name), name
    assert len(shown["train/loss"]) == 7 and [step for step, _ in shown["train/forgetting"]] == [0, 3, 6, 7]


@pytest.mark.parametrize("asked", mostly(([], ["none"]), [].__eq__), ids=str)
def test_nothing_is_reported_unless_asked(place: Path, reported: Training, tmp_path: Path, asked: list[str]) -> None:
    done = run(place, tmp_path / "out", TrainingStart(report_to=tuple(asked)))
    shard = "expansion-default-00001-of-00001.safetensors"
    assert digests(done.path)[shard] == digests(reported.path)[shard], "a reported run learns the same"
    assert {path.name for path in (done.path / "training").iterdir()} == {"settings.json", "log.jsonl", "curves.png"}


@pytest.mark.slow
@pytest.mark.parametrize("stop", mostly([1, 5], (5).__eq__))
def test_a_resumed_run_goes_on_in_the_same_place(place: Path, reported: Training, tmp_path: Path, stop: int) -> None:
    with refused("training-interrupted", tmp_path / "out", TrainingError):
        run(place, tmp_path / "out", track=stopping_at(stop + 1))
    assert read_board(tmp_path / "out" / "training" / "runs")["train/loss"][-1][0] == stop
    done = run(place, tmp_path / "out", TrainingStart(resume=True, report_to=("tensorboard",)))
    resumed, whole = (read_board(training.path / "training" / "runs") for training in (done, reported))
    assert [resumed[f"train/{name}"] for name in NAMES] == [whole[f"train/{name}"] for name in NAMES]
    assert len(list((done.path / "training" / "runs").iterdir())) > 1, "the control: both runs wrote there"


@pytest.mark.slow
def test_every_command_takes_the_folder_and_leaves_the_reports(place: Path, reported: Training, tmp_path: Path) -> None:
    board = {name for name in digests(reported.path) if "runs" in name}
    assert board
    assert inspect(reported.path)
    assert verify(reported.path, probes=None, record=False).passed
    strip(reported.path, tmp_path / "base")
    assert digests(tmp_path / "base") == digests(SHIPPED_MODEL)
    extract(reported.path, tmp_path / "extract")
    merge(reported.path, tmp_path / "merged")
    load(reported.path).save_pretrained(tmp_path / "saved")
    adopt(tmp_path / "saved", reported.path, tmp_path / "adopted")
    route_export(reported.path, tmp_path / "routed")
    for made in ("extract", "merged", "adopted", "routed"):
        assert not [name for name in digests(tmp_path / made) if "tfevents" in name], made
    settings = TrainingSettings(steps=1, sequence_length=32, batch_size=2)
    followed = train(reported.path, [place / "texts.jsonl"], tmp_path / "followed", settings)
    assert not (followed.path / "training" / "runs").exists() and len(digests(followed.path)) > 1


# refusals


def test_what_is_unknown_or_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations import integration_utils

    (unknown,) = problems(find_reports, ("tensorbord", "tensorboard"), error=TrainingError)
    assert unknown.phrase.startswith("--report-to is tensorbord, expected some of: ")
    assert "wandb" in unknown.values["choices"]
    monkeypatch.setattr(integration_utils, "is_tensorboard_available", lambda: False)
    flyte, azure, board = problems(find_reports, ("flyte", "azure_ml", "tensorboard"), error=TrainingError)
    assert board == Problem("report-without-package", "--report-to", name="tensorboard", package="tensorboard")
    assert [flyte.code, azure.code] == ["report-refused"] * 2
    assert "flytekit" in flyte.values["error"] and "azureml-sdk" in azure.values["error"]


def test_the_command_refuses_before_any_work_and_takes_several(place: Path, tmp_path: Path) -> None:
    words = ["train", place / "adapt", "--data", place / "texts.jsonl", "-o", tmp_path / "out"]
    outcome = command.run(*words, "--report-to", "tensorboard, wandbb", "--report-to", "x", "--json", code=1)
    assert not (tmp_path / "out").exists()
    found = [problem["found"] for problem in json.loads(outcome.stdout)["problems"]]
    assert found == ["is wandbb", "is x"]
    options = ["--report-to", "tensorboard", "--steps", "1", "--sequence-length", "32", "--set", "warmup=0", "--quiet"]
    command.run(*words, *options, "--cache-dir", tmp_path / "cache")
    assert read_board(tmp_path / "out" / "training" / "runs")["train/loss"] and any((tmp_path / "cache").iterdir())
