"""In which precision a base in bfloat16 trains: by what the processor has, unless somebody says so."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoTokenizer

from scale_surgery import Request, RunOptions, TrainingError, TrainingSettings, TrainingStart, expand, strip, train
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.folder.folder import open_folder
from scale_surgery.folder.record import read_manifest
from scale_surgery.running.device import has_bfloat16
from scale_surgery.running.freeze import expansion_parts
from scale_surgery.running.loss import measure
from scale_surgery.text.sequences import Sequences
from scale_surgery.training import arguments
from scale_surgery.training.arguments import choose_precision, make_arguments
from scale_surgery.training.load_model import load_to_train
from scale_surgery.training.trainer import full_tensor, whole_tensors
from tests.conftest import digests, problems, refused
from tests.tiny import save_tiny
from tests.training.test_train import stopping_at, write_lines

SETTINGS = TrainingSettings(steps=2, sequence_length=16, batch_size=2, log_every=1, save_every=1)
CPU = RunOptions(device="cpu")
INSTRUCTIONS = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, and an expanded base in bfloat16."""
    folder = tmp_path_factory.mktemp("precision")
    write_lines(folder / "new.jsonl", [{"text": "a b c d e f g h " * 12}])
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    base = save_tiny(folder / "base", "llama", dtype=torch.bfloat16, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(base)
    expand(base, Request("1-2", variant="adapt"), folder / "wide")
    return folder


@pytest.mark.skipif(platform.machine() != "x86_64", reason="asks for instructions of x86")
@pytest.mark.parametrize("has", [(False, False), (True, False), (False, True)])
def test_the_processor_is_asked(monkeypatch: pytest.MonkeyPatch, has: tuple[bool, bool]) -> None:
    for name, is_there in zip(INSTRUCTIONS, has, strict=True):
        monkeypatch.setattr(torch.cpu, name, lambda is_there=is_there: is_there)
    assert has_bfloat16("cpu") is any(has)
    assert has_bfloat16("cuda"), "accelerators have them"


@pytest.mark.parametrize(
    ("stored", "asked", "has", "expected"),
    [
        ("BF16", None, True, (True, False)),
        ("BF16", None, False, (False, True)),
        ("BF16", True, False, (True, False)),
        ("BF16", False, False, (False, False)),
        ("BF16", False, True, (False, False)),
        ("F32", None, True, (False, False)),
        ("F32", True, False, (True, False)),
        ("F16", None, True, (True, False)),
        ("F16", None, False, (False, True)),
        ("F16", True, False, (True, False)),
        # never in float16, in which small gradients would be zero
        ("F16", False, True, (False, True)),
    ],
)
def test_what_is_chosen(
    monkeypatch: pytest.MonkeyPatch, stored: str, asked: bool | None, has: bool, expected: tuple[bool, bool]
) -> None:
    monkeypatch.setattr(arguments, "has_bfloat16", lambda device: has)
    precision = choose_precision(stored, replace(SETTINGS, bf16=asked), CPU)
    assert (precision.bf16, precision.widens) == expected
    assert bool(precision.reason) is (stored != "F32")


@pytest.mark.parametrize("has", [True, False])
def test_a_run_says_and_records_it(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has: bool) -> None:
    monkeypatch.setattr(arguments, "has_bfloat16", lambda device: has)
    said: list[Any] = []
    data, start = [place / "new.jsonl"], TrainingStart(announce=said.append)
    model = load_to_train(open_folder(place / "wide"), SETTINGS, CPU)
    assert model.model.embed_tokens.weight.dtype == (torch.bfloat16 if has else torch.float32)
    output = train(place / "wide", data, tmp_path / "out", SETTINGS, start=start, run=CPU).path
    reason = "autocast to bfloat16; the base is stored in bfloat16" if has else "no instructions for bfloat16"
    assert reason in said[0].precision
    entry = read_manifest(output).training[-1]
    assert entry["precision"] == {"bf16": has, "widens": not has, "reason": said[0].precision}
    # whatever it computed in, files of the base stay, and new tensors keep their dtype
    assert open_checkpoint(output).dtype == "BF16"
    strip(output, tmp_path / "base")
    assert digests(tmp_path / "base") == digests(place / "base")


def test_a_base_in_float16_learns_in_float32(tmp_path: Path, place: Path) -> None:
    """Gradients of a step of many tokens are too small for float16."""
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    base = save_tiny(tmp_path / "base", "llama", dtype=torch.float16, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(base)
    wide = expand(base, Request("1-2", variant="adapt"), tmp_path / "wide").path
    model = load_to_train(open_folder(wide), replace(SETTINGS, bf16=False), CPU)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    output = train(wide, [place / "new.jsonl"], tmp_path / "out", replace(SETTINGS, bf16=False), run=CPU).path
    assert open_checkpoint(output).dtype == "F16"
    assert digests(strip(output, tmp_path / "again").path) == digests(base)


def test_a_run_goes_on_in_the_precision_in_which_it_began(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, output = [place / "new.jsonl"], tmp_path / "out"
    monkeypatch.setattr(arguments, "has_bfloat16", lambda device: True)
    with pytest.raises(TrainingError):
        train(place / "wide", data, output, SETTINGS, run=CPU, track=stopping_at(1))
    monkeypatch.setattr(arguments, "has_bfloat16", lambda device: False)
    start = TrainingStart(resume=True)
    with refused("setting-changed", f"{output}: precision", TrainingError):
        train(place / "wide", data, output, SETTINGS, start=start, run=CPU)
    monkeypatch.setattr(arguments, "has_bfloat16", lambda device: True)
    assert train(place / "wide", data, output, SETTINGS, start=start, run=CPU).steps == 2
    assert json.loads((output / "training" / "settings.json").read_text())["precision"]["bf16"] is True


@pytest.mark.parametrize("bf16", [True, False])
def test_a_configuration_of_accelerate_does_not_overrule(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bf16: bool
) -> None:
    """Its file names a precision for whatever it launches; the record says what was chosen here."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    settings = replace(SETTINGS, learning_rate=1e-3)
    made = make_arguments(settings, tmp_path / "run" / "training", 2, CPU, bf16=bf16, is_measured=False)
    assert made.mixed_precision == ("bf16" if bf16 else "no")


def test_fsdp_of_version_1_is_refused_before_anything_is_read(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.delenv("FSDP_VERSION", raising=False)
    (found,) = problems(train, place / "wide", [place / "new.jsonl"], tmp_path / "out", SETTINGS, run=CPU)
    assert found.code == "fsdp-outdated"
    assert not (tmp_path / "out").exists()


def print_dtypes_of_units(wide: str) -> None:
    """Print the dtypes of trained tensors that units of FSDP2 hold after a measurement, and of those that are saved."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = load_to_train(open_folder(Path(wide)).one(None), SETTINGS, CPU)
    options = {
        "mesh": torch.distributed.init_device_mesh("cpu", (1,)),
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    }
    # as accelerate does it
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=True, **options)
    fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False, **options)
    fully_shard(model, **options)
    ids = torch.randint(3, 50, (32,), dtype=torch.int32)
    measure(model, Sequences(ids, ids, (0, 16, 32)), 2)
    held = {str(full_tensor(part.parameter).dtype) for part in expansion_parts(model)}
    saved = {str(tensor.dtype) for tensor in whole_tensors(model).values()}
    print(json.dumps([sorted(held), sorted(saved)]))
    torch.distributed.destroy_process_group()


def test_what_fsdp2_holds_after_a_measurement_is_saved_as_it_trains(place: Path) -> None:
    """Units that stay whole hold the dtype of the computation; a checkpoint of it would be rounded."""
    line = f"from {__name__} import print_dtypes_of_units; print_dtypes_of_units({str(place / 'wide')!r})"
    words = [sys.executable, "-c", line]
    done = subprocess.run(words, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    held, saved = json.loads(done.stdout.splitlines()[-1])
    assert held == ["torch.bfloat16", "torch.float32"], "the control"
    assert saved == ["torch.float32"]
