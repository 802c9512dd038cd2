"""What most tests of training read: texts in three files, and the shipped model expanded in both variants."""

from __future__ import annotations

from pathlib import Path

import pytest

from scale_surgery import Request, expand
from scale_surgery.biographies import SHIPPED_MODEL, biography, people
from tests.training.test_train import ask, write_lines


@pytest.fixture(scope="package")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """texts.jsonl tells of people whom new.jsonl asks about; old.jsonl asks about people whom the model knows."""
    folder = tmp_path_factory.mktemp("train")
    write_lines(folder / "texts.jsonl", [{"text": biography(person, 3)} for person in people(6, start=400)])
    write_lines(folder / "old.jsonl", ask(0))
    write_lines(folder / "new.jsonl", ask(400))
    (folder / "word.txt").write_text("Hello.", encoding="utf-8")
    expand(SHIPPED_MODEL, Request("2-3"), folder / "preserve")
    expand(SHIPPED_MODEL, Request("2-3", variant="adapt", collaborate="both"), folder / "adapt")
    return folder
