"""Gemma 3 270M and a folder for what is made of it; without the model all tests here are skipped."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import flip
from tests.real.make_model import MODEL

PLACE = Path(__file__).parents[2] / ".real"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test here."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.real)


def pytest_runtest_setup() -> None:
    """Skip all in one place, so that pytest says it in one line."""
    if not (PLACE / MODEL).is_dir():
        pytest.skip(f"{PLACE / MODEL} is not there. Make it: make real-model")


@pytest.fixture(scope="session")
def gemma() -> Path:
    """The base model; hard links of its files are shared, so that no test may change one of them."""
    return PLACE / MODEL


@pytest.fixture(scope="session")
def room(gemma: Path) -> Iterator[Path]:
    """A folder beside the model, where hard links to its files can be made."""
    with tempfile.TemporaryDirectory(dir=PLACE, prefix="tests-") as folder:
        yield Path(folder)


@contextmanager
def copied(file: Path, room: Path) -> Iterator[Path]:
    """Put a copy in the place of a file that may be a hard link, to be changed while the block runs."""
    kept = room / "kept"
    file.rename(kept)
    try:
        shutil.copyfile(kept, file)
        yield file
    finally:
        file.unlink()
        kept.rename(file)


@contextmanager
def flipped(file: Path, room: Path) -> Iterator[None]:
    """Let one bit of a file be another one while the block runs."""
    with copied(file, room):
        flip(file)
        yield
