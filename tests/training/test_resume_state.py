"""A resumed run reads tensors and plain values: a foreign pickle runs no code, and what is damaged is named."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from scale_surgery import Request, TrainingError, TrainingSettings, TrainingStart, expand, train
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.training.resume_state import reading_state
from tests.conftest import edited, problems, refused
from tests.fuzz.files import Planted
from tests.training.test_train import stopping_at

SETTINGS = TrainingSettings(steps=3, save_every=1, batch_size=1, sequence_length=8, log_every=1)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that somebody stopped after its second step."""
    place = tmp_path_factory.mktemp("interrupted")
    (place / "text.txt").write_text("Mara Lind was born in Oslo. " * 20)
    expand(SHIPPED_MODEL, Request("last:1"), place / "expanded")

    with refused("training-interrupted", place / "out", TrainingError):
        train(place / "expanded", [place / "text.txt"], place / "out", SETTINGS, track=stopping_at(2))
    return place


@pytest.fixture
def run(interrupted: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged by a test."""
    return Path(shutil.copytree(interrupted, tmp_path / "run"))


def resume(run: Path) -> None:
    train(run / "expanded", [run / "text.txt"], run / "out", SETTINGS, start=TrainingStart(resume=True))


def state_of(run: Path) -> Path:
    (checkpoint,) = (run / "out" / "training").glob("checkpoint-*")
    return checkpoint


def edit_state(folder: Path, **values: object) -> None:
    with edited(folder / "trainer_state.json") as state:
        state |= values


def lose_a_tensor(folder: Path) -> None:
    with edited(folder / "expansion.safetensors") as tensors:
        tensors.popitem()


def make_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no pickle": lambda folder: (folder / "optimizer.pt").write_bytes(b"x"),
    "other values": lambda folder: torch.save({"a": 1}, folder / "optimizer.pt"),
    "a schedule": lambda folder: torch.save([1], folder / "scheduler.pt"),
    "random state": lambda folder: torch.save({}, folder / "rng_state.pth"),
    "a pipe": lambda folder: make_pipe(folder / "optimizer.pt"),
    "no tensors": lambda folder: (folder / "expansion.safetensors").write_bytes(b"x"),
    "a tensor that is gone": lose_a_tensor,
    "no JSON": lambda folder: (folder / "trainer_state.json").write_text("{"),
    "a step": lambda folder: edit_state(folder, global_step="x"),
    "a log": lambda folder: edit_state(folder, log_history=[3]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_no_run_wrote_is_named(run: Path, damage: str) -> None:
    folder = state_of(run)
    DAMAGE[damage](folder)
    (found,) = problems(resume, run, error=TrainingError)
    assert (found.code, found.where) == ("run-damaged", f"{folder}") and found.details


@pytest.mark.parametrize("name", ("optimizer.pt", "scheduler.pt", "rng_state.pth"))
def test_a_foreign_pickle_runs_no_code(run: Path, tmp_path: Path, name: str) -> None:
    made = tmp_path / "made by the pickle"
    content = pickle.dumps(Planted(made))
    pickle.loads(content)  # the control: it would
    made.unlink()
    (state_of(run) / name).write_bytes(content)
    with refused("run-damaged", state_of(run), TrainingError):
        resume(run)
    torch.save(Planted(made), state_of(run) / name)
    with refused("run-damaged", state_of(run), TrainingError):
        resume(run)
    assert not made.exists()


def test_a_folder_of_another_name_is_no_checkpoint(run: Path) -> None:
    folder = run / "out" / "training" / "checkpoint-best"
    folder.mkdir()
    (folder / "complete.json").write_text("{}")
    resume(run)


@pytest.mark.parametrize(
    "error", (torch.OutOfMemoryError("full"), MemoryError("full"), torch.distributed.DistError("lost"))
)
def test_what_says_nothing_of_the_files_is_no_damage(run: Path, error: Exception) -> None:
    """Who is told to begin anew with --overwrite would remove a good run."""
    with pytest.raises(type(error), match=r"full|lost"), reading_state(run):
        raise error
    with refused("run-damaged", run, TrainingError), reading_state(run):
        raise RuntimeError("a tensor that no run wrote")
