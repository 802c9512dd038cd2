"""Where models run when nobody says so, and that who sets one field of RunOptions leaves the others alone."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import pytest
import torch

import scale_surgery
from scale_surgery import (
    PlanError,
    Request,
    RunOptions,
    TrainingError,
    evaluate,
    expand,
    merge,
    report,
    train,
    verify,
)
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.cli.program import main
from scale_surgery.progress import Progress
from scale_surgery.running import loading
from scale_surgery.running.device import choose_device, is_out_of_memory
from scale_surgery.running.options import Dtype
from scale_surgery.training.arguments import check_device
from tests.conftest import refused
from tests.tiny import save_tiny


def with_accelerator(monkeypatch: pytest.MonkeyPatch, kind: str | None) -> None:
    """Let torch say that this machine has an accelerator, or none."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: kind is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: kind and torch.device(kind))


@pytest.mark.parametrize(
    ("kind", "expected", "in_training"), ((None, "cpu", "cpu"), ("cuda", "cuda", "cuda"), ("mps", "cpu", "mps"))
)
def test_auto_takes_what_can_do_the_work(monkeypatch, kind, expected, in_training):
    with_accelerator(monkeypatch, kind)
    assert choose_device("auto") == RunOptions(trust_remote_code=True).placed().device == expected
    assert choose_device("auto", only_trains=True) == in_training
    assert choose_device("cpu") == choose_device("cpu", only_trains=True) == "cpu"


def test_a_device_that_torch_does_not_know():
    with refused("device-unknown", "--device", PlanError):
        choose_device("abacus")


def test_the_default_of_every_function_is_the_default_of_the_options():
    functions = [getattr(scale_surgery, name) for name in scale_surgery.__all__]
    defaults = {
        function.__name__: inspect.signature(function).parameters["run"].default
        for function in functions
        if inspect.isfunction(function) and "run" in inspect.signature(function).parameters
    }
    assert {"expand", "verify", "train", "evaluate", "report", "merge"} <= set(defaults)
    # a caller's own RunOptions replaces the default wholly: what differs from the bare one would be lost
    assert set(defaults.values()) == {RunOptions()}


def test_the_default_of_every_command_is_auto():
    devices = [
        option
        for command in main.commands.values()
        for option in command.params
        if isinstance(option, click.Option) and option.name == "device"
    ]
    assert len(devices) >= 9
    # the function's default is taken where none is given, and a recipe's
    assert {option.default for option in devices} == {None} and RunOptions().device == "auto"
    assert all("auto" in (option.help or "") for option in devices)


@pytest.fixture(scope="module")
def expanded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("device")
    return expand(SHIPPED_MODEL, Request("last:1"), folder / "expanded").path


@pytest.mark.parametrize(("run", "passes"), ((RunOptions(trust_remote_code=True), 3), (RunOptions(batch_size=2), 2)))
def test_other_fields_leave_the_batch_to_the_operation(expanded, tmp_path, run, passes):
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "Ada was born in Rome."}\n' * 3, encoding="utf-8")
    seen: list[int] = []

    @contextmanager
    def track(label: str, total: int) -> Iterator[Progress]:
        yield lambda advance, note="": seen.append(advance) if label == "base stream" else None

    report(expanded, [texts], run=run, track=track)
    assert len(seen) == passes, "hidden states of one window are held at a time, unless more are asked for"


def test_a_device_that_is_not_there_is_named_before_any_work(expanded, tmp_path, monkeypatch):
    """Not by torch, of a folder with a name that nobody gave, after half of the work."""
    with_accelerator(monkeypatch, None)
    text, run = tmp_path / "text.txt", RunOptions(device="cuda")
    text.write_text("Ada was born in Rome.")
    train_on = functools.partial(train, expanded, [text], tmp_path / "made")
    asked = (
        lambda: train_on(run=run),
        lambda: verify(expanded, run=run, record=False),
        lambda: report(expanded, run=run),
        lambda: evaluate(expanded, text, run=run),
        lambda: merge(expanded, tmp_path / "merged", run=run),
        lambda: expand(SHIPPED_MODEL, Request("0"), tmp_path / "made", run=run),
    )
    for ask in asked:
        with refused("device-without-accelerator", "--device", PlanError):
            ask()
    with_accelerator(monkeypatch, "cuda")
    with refused("training-device", "--device", TrainingError):
        train_on(run=RunOptions(device="cuda:1"))
    check_device(RunOptions(device="cuda:0"))
    assert [file.name for file in tmp_path.iterdir()] == ["text.txt"]
    monkeypatch.undo()
    numbers = verify(expanded, record=False).to_json()["numbers"]
    assert numbers["device"] == RunOptions().placed().device, "the control: a check says where it ran"


def test_memory_that_the_processor_lacks_is_memory() -> None:
    with pytest.raises(RuntimeError) as full:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(full.value)
    assert not is_out_of_memory(RuntimeError("shapes do not match")), "the control"


@pytest.mark.parametrize(
    ("has", "size", "dtype", "slow"),
    [
        (False, 0, None, "bfloat16"),
        (True, 0, None, ""),
        (False, loading.SMALL, None, ""),
        (False, 0, "bfloat16", ""),
    ],
    ids=["slow", "with instructions", "small", "as asked"],
)
def test_half_precision_that_is_slow_on_this_processor_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has: bool,
    size: int,
    dtype: Dtype | None,
    slow: str,
) -> None:
    base = save_tiny(tmp_path / "base", "llama", dtype=torch.bfloat16)
    monkeypatch.setattr(loading, "SMALL", size)
    monkeypatch.setattr(loading, "has_bfloat16", lambda device: has)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [handler])
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]
    with loading.loaded(base, RunOptions(device="cpu", dtype=dtype)) as (model, problems):
        assert model.dtype == torch.bfloat16
        assert not problems
    assert [f"no instructions for {slow}" in line for line in said] == ([True] if slow else [])
