"""The demo: the whole job on the shipped model."""

from __future__ import annotations

from pathlib import Path

import pytest

from scale_surgery import CheckpointError
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.demo import demo
from scale_surgery.show.console import Output
from tests.conftest import digests


def test_the_demo_keeps_every_promise_and_can_be_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = demo(Path("demo"), Output(), steps=2)
    assert result.passed and result.verified and result.files_compared == result.files_identical == 6
    assert result.verified_after_training and len(result.lesson.scores) == 7
    base, *others = result.lesson.scores
    assert base.old.accuracy == 1.0
    assert [score.old == base.old for score in others if score.kind == "disabled"] == [True, True]
    assert result.reloaded.logits_bit_equal and not result.reloaded.imported_scale_surgery
    assert result.reloaded.answer == result.reloaded.expected
    assert digests(tmp_path / "demo" / "stripped") == digests(SHIPPED_MODEL)
    text = capsys.readouterr().out
    for command in (
        "inspect demo/biographies",
        "expand demo/biographies --layers all",
        "train demo/expanded",
        "route-export demo/adapt",
        "strip demo/trained",
    ):
        assert f"$ scale-surgery {command}" in text
    assert "All promises kept." in text


def test_the_demo_replaces_only_what_a_demo_made(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(CheckpointError, match=r"mine: exists and was not made by a demo\. Choose another folder"):
        demo(tmp_path / "mine", Output())
    assert list((tmp_path / "mine").iterdir()) == []
