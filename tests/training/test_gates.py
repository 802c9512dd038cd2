"""Training gates: what it asks for, its loss, and that gates learn to tell the texts apart."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scale_surgery import PlanError, Request, TrainingError, TrainingSettings, expand, merge, train
from scale_surgery.biographies import SHIPPED_MODEL, biography, people
from scale_surgery.checkpoint.folder import open_checkpoint, read_tensor
from scale_surgery.running.gates import gated_blocks, keeping_scores, take_scores
from scale_surgery.running.tokenizer import need_tokenizer
from scale_surgery.training.gates import NEW_WEIGHT, loss_of_gates
from tests.conftest import load, refused
from tests.training.test_train import write_lines

SETTINGS = TrainingSettings(
    steps=30, batch_size=4, sequence_length=48, learning_rate=2e-2, rehearse=("self",), rehearsal_samples=40
)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    request = Request("2-3", variant="gated", collaborate="both")
    return expand(SHIPPED_MODEL, request, tmp_path_factory.mktemp("gated") / "wide").path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    new = [biography(person, style).upper() for person in people(12, start=900) for style in range(4)]
    return str(write_lines(tmp_path_factory.mktemp("text") / "new.jsonl", [{"text": document} for document in new]))


def gates_of(folder: Path) -> dict[str, Tensor]:
    checkpoint = open_checkpoint(folder)
    return {name: read_tensor(checkpoint, name) for name in checkpoint.tensors if name.endswith(".gate")}


def scores(model: Any, text: str) -> float:
    """Mean score of all gates on a text."""
    ids = need_tokenizer(SHIPPED_MODEL, "base")(text, return_tensors="pt")["input_ids"]
    with torch.no_grad(), keeping_scores(model):
        model(input_ids=ids)
        return float(torch.cat(take_scores(model), -1).mean())


def test_gates_want_rehearsal(wide: Path, text: str, tmp_path: Path) -> None:
    with refused("gates-without-rehearsal", wide, TrainingError):
        train(wide, [text], tmp_path / "learned", TrainingSettings(steps=1))


def test_the_loss_is_the_cross_entropy_of_open_and_shut(wide: Path) -> None:
    model, mask = load(wide), torch.tensor([[0, 1, 1], [1, 1, 1]])
    for is_new, weight in ((True, NEW_WEIGHT), (False, 1.0)):
        with torch.no_grad(), keeping_scores(model):
            model(input_ids=torch.tensor([[0, 5, 6], [7, 8, 9]]), attention_mask=mask)
            loss = loss_of_gates(model, mask, is_new=is_new)

        # before any training the score of each gate is 3
        assert float(loss) == pytest.approx(weight * math.log1p(math.exp(-3.0 if is_new else 3.0)), rel=1e-5)


def test_gates_learn_to_tell_the_texts_apart(wide: Path, text: str, tmp_path: Path) -> None:
    learned = train(wide, [text], tmp_path / "learned", SETTINGS).path
    model = load(learned)
    known, new = biography(people(1)[0], 0), biography(people(1, start=900)[0], 0).upper()

    assert all(tensor.count_nonzero() for tensor in gates_of(learned).values())
    assert scores(model, new) > scores(model, known) + 1
    # the control
    assert scores(load(wide), new) == scores(load(wide), known) == 3.0
    assert not any(hasattr(blocks, "scores") for blocks in gated_blocks(model))


def test_another_trainer_is_told_that_gates_do_not_learn(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop without the loss of gates; the controls are a model that is asked, and one that keeps the scores."""
    said = list[str]()
    model, batch = load(wide), {"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[5, 6, 7]])}
    monkeypatch.setattr("scale_surgery.modeling.expanded_stock.warn", said.append)
    model.eval()(**batch)
    with keeping_scores(model.train()):
        model(**batch)
    assert not said
    model(**batch)["loss"].backward()
    assert {line.partition(":")[0] for line in said} == {"The gates of this model do not learn here"}
    assert all(blocks.gate.grad is None for blocks in gated_blocks(model))


def test_gates_that_do_not_train_stay_as_they_are(wide: Path, text: str, tmp_path: Path) -> None:
    groups = ("w12", "w21", "w22")
    settings = TrainingSettings(steps=2, batch_size=2, sequence_length=48, groups=groups)
    learned = train(wide, [text], tmp_path / "learned", settings).path

    assert not any(tensor.count_nonzero() for tensor in gates_of(learned).values())


def test_gates_have_no_stock_form(tmp_path: Path) -> None:
    narrow = Request("2-3", variant="gated", collaborate="both", up_width=0)
    made = expand(SHIPPED_MODEL, narrow, tmp_path / "wide").path

    with refused("stock-gates", "--to stock", PlanError):
        merge(made, tmp_path / "stock", to="stock")
