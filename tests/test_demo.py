"""The demo: the whole job on the shipped model."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from scale_surgery import CheckpointError
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.cli.program import main
from scale_surgery.demo import Demo, count_kept_tensors, demo, has_every_base, render_lesson
from scale_surgery.show.console import Output
from tests.conftest import digests, refused

pytestmark = pytest.mark.slow
ROUTED = "job/routed"
ROWS = {"base": "biographies", "preserve": "trained", "learn, without its router": ROUTED, "learn": ROUTED}


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Demo, str]:
    """A short demo in a folder of its own, and what it printed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("place"))
        out = Output()
        out.results = Console(file=StringIO(), width=100, highlight=False, markup=False)
        # what is printed is quoted for a shell
        result = demo(Path("my demo"), out, steps=2)
        return replace(result, folder=Path("my demo").resolve()), out.results.file.getvalue()


def base_bytes(text: str) -> dict[str, str]:
    """The last column of the table at the end, by row."""
    rows = re.findall(r"^(\S.*?) +(?:[\d.]+ +)?[\d.]+% +[\d.]+% +(\S.*?) *$", text, re.MULTILINE)
    return {title: kept for title, kept in rows if title in (*ROWS, "full fine-tuning")}


def base_bytes_now(result: Demo) -> dict[str, str]:
    """The same column, with the base tensors of every model counted again."""
    console = Console(file=StringIO(), width=100, highlight=False, markup=False)
    console.print(render_lesson(replace(result, base_tensors_kept=count_kept_tensors(result.folder)), 20))
    return base_bytes(console.file.getvalue())


def spoil(folder: Path) -> tuple[Path, bytes]:
    """Change one byte of one base tensor; gives the file and what it was."""
    info = open_checkpoint(folder).tensors["model.layers.1.mlp.down_proj.weight"]
    file = folder / info.file
    before = file.read_bytes()
    spoiled = bytearray(before)
    spoiled[info.offset] ^= 1
    file.unlink()  # it may be one file with that of another model
    file.write_bytes(spoiled)
    return file, before


def test_the_demo_keeps_every_promise(shown):
    result, text = shown
    assert result.passed and result.verified and result.files_compared == result.files_identical == 6
    assert result.verified_after_training and len(result.lesson.scores) == 7
    base, *others = result.lesson.scores
    assert base.old.accuracy == 1.0
    assert [score.old == base.old for score in others if score.kind == "disabled"] == [True, True]
    assert result.reloaded.logits_bit_equal and not result.reloaded.imported_scale_surgery
    assert result.reloaded.answer == result.reloaded.expected
    assert digests(result.folder / "stripped") == digests(SHIPPED_MODEL)
    assert "All promises kept." in text


def test_what_the_demo_prints_can_be_typed(shown):
    lines = [shlex.split(line)[1:] for line in shown[1].splitlines() if line.startswith("$ ")]
    typed = {}
    for program, name, *words in lines:
        if program == "scale-surgery":
            typed[name, words[0]] = main.commands[name].make_context(name, [*words]).params
    place = "my demo"
    assert list(typed) == [
        ("learn", f"{place}/biographies"),
        ("inspect", f"{place}/biographies"),
        ("plan", f"{place}/biographies"),
        ("expand", f"{place}/biographies"),
        ("verify", f"{place}/expanded"),
        ("train", f"{place}/expanded"),
        ("evaluate", f"{place}/trained"),
        ("verify", f"{place}/trained"),
        ("strip", f"{place}/trained"),
    ]
    train, evaluate = typed["train", f"{place}/expanded"], typed["evaluate", f"{place}/trained"]
    assert (train["steps"], train["sequence_length"], train["learning_rate"]) == (2, 128, 0.01)
    assert evaluate["batch_size"] == 64 and len(evaluate["models"]) == 3
    assert ["diff", "-r", f"{place}/biographies", f"{place}/stripped"] in lines


def test_the_table_says_what_was_counted(shown):
    result, text = shown
    assert result.base_tensors == 38
    assert result.base_tensors_kept == {"biographies": 38, "trained": 38, "job/routed": 38, "fine-tuned": 0}
    assert base_bytes(text) == dict.fromkeys(ROWS, "all there") | {"full fine-tuning": "overwritten"}
    rates = dict(re.findall(r"^(\S.*?) +([\d.]+) +[\d.]+% +[\d.]+% +(?:all|over)", text, re.MULTILINE))
    learned = {"learn, without its router": "0.003", "learn": "0.003"}
    assert rates == {"preserve": "0.01", **learned, "full fine-tuning": "0.001"}


@pytest.mark.parametrize("folder", sorted(set(ROWS.values())))
def test_a_model_that_lost_one_base_byte_is_not_all_there(shown, folder):
    result, text = shown
    file, before = spoil(result.folder / folder)
    try:
        damaged = {title: "37 of 38 tensors" for title, name in ROWS.items() if name == folder}
        assert base_bytes_now(result) == base_bytes(text) | damaged
        assert not has_every_base(result.base_tensors, count_kept_tensors(result.folder))
    finally:
        file.write_bytes(before)
    assert base_bytes_now(result) == base_bytes(text)


def test_the_demo_replaces_only_what_a_demo_made(tmp_path):
    (tmp_path / "mine").mkdir()
    with refused("folder-of-no-demo", tmp_path / "mine", CheckpointError):
        demo(tmp_path / "mine", Output())
    assert list((tmp_path / "mine").iterdir()) == []
