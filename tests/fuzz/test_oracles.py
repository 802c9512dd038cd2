"""The campaign finds what it looks for: operations with one defect each, and one without."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scale_surgery import Request, SurgeryError, expand
from scale_surgery.errors import Problem
from tests.fuzz import case
from tests.fuzz.case import Outcome, run_case
from tests.fuzz.operations import Call, Operation
from tests.fuzz.oracles import changed_content, is_verified, unprintable


@pytest.fixture
def seeds(base_of: Callable[..., Path], tmp_path: Path) -> Path:
    shutil.copytree(base_of("llama"), tmp_path / "base")
    return tmp_path


def refuse(call: Call) -> None:
    raise SurgeryError(Problem("interrupted"))


def leave_something(call: Call) -> None:
    (call.out.parent / "made.partial").mkdir()
    refuse(call)


def write_beside(call: Call) -> None:
    call.out.mkdir()
    (call.out.parent / ".made.lock").touch()


def spoil(call: Call) -> None:
    """What expand makes, with a bit of the base changed."""
    expand(call.beside("base"), Request("1"), call.out)
    (shard,) = call.out.glob("model*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x7f")


DEFECTS: dict[str, Callable[[Call], Any]] = {
    "escape": lambda call: {}["x"],
    "slow": lambda call: time.sleep(30),
    "memory": lambda call: bytearray(2 * case.MORE_MEMORY),
    "input changed": lambda call: (call.model / "new").touch(),
    "written outside": lambda call: (call.place.parent / "outside" / "canary").unlink(),
    "code ran": lambda call: (call.place.parent / "outside" / "it-ran").touch(),
    "left behind": leave_something,
    "left beside the target": write_beside,
    "raw control characters": lambda call: call.out.with_name("printed").write_text("\x1b[31mred", encoding="utf-8"),
}


def outcome(seeds: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[[Call], Any], number: int = 0) -> Outcome:
    monkeypatch.setattr(case, "OPERATIONS", (Operation("x", run, ("base",)),))
    return run_case(seeds, 0, number)


@pytest.mark.parametrize("kind", DEFECTS)
def test_a_defect_is_found(seeds: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(case, "SECONDS", 1 if kind == "slow" else case.SECONDS)
    finding = outcome(seeds, monkeypatch, DEFECTS[kind])
    assert (finding.outcome, finding.kind) == ("finding", kind)


def test_what_has_no_defect_is_no_finding(seeds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(seeds, monkeypatch, refuse).outcome == "refused"
    assert outcome(seeds, monkeypatch, lambda call: None).outcome == "accepted"


def test_what_was_made_has_to_verify(seeds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case, "MUTATORS", dict.fromkeys(case.MUTATORS, lambda dice, file, outside: "nothing"))
    finding = outcome(seeds, monkeypatch, spoil)
    assert finding.kind == "made what verify refuses", finding


def test_a_case_can_be_repeated(seeds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, repeated, second = (outcome(seeds, monkeypatch, refuse, number) for number in (1, 1, 2))
    assert first == repeated
    assert first.did and first.did != second.did


def test_changed_content_is_seen(seeds: Path, tmp_path: Path) -> None:
    made = expand(seeds / "base", Request("1"), tmp_path / "made").path
    copy = Path(shutil.copytree(made, tmp_path / "copy"))
    assert changed_content(copy, made) == [] and is_verified(copy)
    (copy / "planted.py").touch()
    (copy / "generation_config.json").write_text("{}", encoding="utf-8")
    assert changed_content(copy, made) == ["generation_config.json", "planted.py"] and not is_verified(copy)
    assert list(unprintable("a\x1b\n\ud800")) == ["U+001B", "U+D800"]
