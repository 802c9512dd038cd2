"""Training on the device: gradients are those of a dense block matrix, runs leave the base's bytes as they were."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters

from scale_surgery import (
    EvalData,
    Request,
    RunOptions,
    TrainingError,
    TrainingSettings,
    TrainingStart,
    expand,
    route_export,
    strip,
    train,
    verify,
)
from scale_surgery.biographies import SHIPPED_MODEL, biography, people
from scale_surgery.modeling.expanded_routers import PosteriorRouter, Router
from tests.conftest import digests, load
from tests.modeling import test_training_modes as modes
from tests.modeling.test_training_modes import autocast, check, check_noise, enable_checkpointing, gradients
from tests.tiny import FAMILIES
from tests.training.test_train import SHORT, ask, stopping_at, write_lines

path_of, model_of, wanted_of, noise_of = modes.path_of, modes.model_of, modes.wanted_of, modes.noise_of
compiler = modes.compiler
ROOT = Path(__file__).parents[2]
SHARD = "expansion-default-00001-of-00001.safetensors"
SETTINGS = TrainingSettings(steps=4, save_every=2, eval_every=2, **SHORT)

each_kind = pytest.mark.parametrize("family", modes.KINDS)
each_variant = pytest.mark.parametrize("request_name", ("preserve", "adapt"))


# ---- gradients


@pytest.mark.parametrize("request_name", modes.REQUESTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients(model_of: Any, wanted_of: Any, device: str, family: str, request_name: str) -> None:
    for options in ("none", *(modes.CHECKPOINTING if family in modes.KINDS else ())):
        model = model_of(family, request_name).to(device)
        if options != "none":
            enable_checkpointing(model, options)
        check(gradients(model), wanted_of(family, request_name))


@each_kind
@each_variant
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_gradients_in_bfloat16(
    model_of: Any, wanted_of: Any, noise_of: Any, device: str, family: str, request_name: str, dtype: str
) -> None:
    """By autocast, of a float32 base and of a bfloat16 base with a float32 expansion."""
    which = (family, request_name, dtype)
    device_gradients = gradients(model_of(*which).to(device), context=lambda: autocast(torch.device(device).type))
    check_noise(device_gradients, wanted_of(*which), noise_of(*which))


@pytest.mark.gpu  # a compiler takes long
@each_kind
@each_variant
@pytest.mark.filterwarnings("ignore")  # those of the compiler are its own
def test_gradients_of_a_compiled_model(
    model_of: Any, wanted_of: Any, compiler: None, device: str, family: str, request_name: str
) -> None:
    """On a GPU by torch's default compiler; on the CPU that needs a compiler of C++."""
    model = model_of(family, request_name).to(device)
    backend = "aot_eager" if device == "cpu" else "inductor"
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    check(gradients(model, lambda **inputs: compiled(**inputs, use_cache=False)), wanted_of(family, request_name))
    assert counters["stats"]["unique_graphs"] == 1


# ---- runs


@dataclass(frozen=True)
class Grown:
    """A way to grow the shipped model, and the promise that a trained one keeps beside the bytes of the base."""

    request: Request
    router: Router | None = None
    keeps: str | None = None


GROWN = {
    "preserve": Grown(Request("2-3"), keeps="base_stream_always"),
    "adapt": Grown(Request("2-3", variant="adapt", collaborate="both")),
    "grow-freeze": Grown(Request("2-3", method="grow")),
    "grow-train": Grown(Request("2-3", method="grow", variant="grow-train")),
    "depth": Grown(Request("1,3", method="depth")),
    "routed": Grown(Request("2-3", variant="adapt"), PosteriorRouter(switch_rate=0.0), "bounded_forgetting"),
}
MODES = {
    "default": {},
    "bf16": {"bf16": True},
    "checkpointing": {"gradient_checkpointing": True},
    "padded_and_accumulated": {"packing": False, "sequence_length": 128, "gradient_accumulation": 2},
    "all": {"bf16": True, "gradient_checkpointing": True, "gradient_accumulation": 2},
}


def place_of(device: str) -> RunOptions:
    """How `train` is told: it takes the accelerator there is, or the CPU."""
    return RunOptions(device="cpu" if device == "cpu" else "auto")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    write_lines(folder / "learn.jsonl", [{"text": biography(person, 3)} for person in people(12, start=400)])
    write_lines(folder / "old.jsonl", ask(0))
    return folder


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The shipped model as it is, and in bfloat16."""
    half = tmp_path_factory.mktemp("bfloat16") / "biographies"
    half.mkdir()
    for file in SHIPPED_MODEL.iterdir():
        if file.suffix in (".json", ".txt"):
            (half / file.name).write_bytes(file.read_bytes())
    load(SHIPPED_MODEL, dtype=torch.bfloat16).save_pretrained(half)
    return {"float32": SHIPPED_MODEL, "bfloat16": half}


def grow(base: Path, grown: Grown, folder: Path) -> Path:
    made = expand(base, grown.request, folder / "expanded").path
    return made if grown.router is None else route_export(made, folder / "routed", grown.router).path


def moved(before: Path, after: Path) -> set[str]:
    """Names of the new tensors whose bytes changed."""
    start, now = load_file(before / SHARD), load_file(after / SHARD)
    assert start.keys() == now.keys()
    return {name for name, tensor in now.items() if not torch.equal(tensor, start[name])}


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", GROWN)
def test_a_run_leaves_the_base_as_it_was(
    tmp_path: Path, texts: Path, bases: dict[str, Path], device: str, name: str, mode: str, dtype: str
) -> None:
    grown, base = GROWN[name], bases[dtype]
    path = grow(base, grown, tmp_path)
    settings = replace(SETTINGS, routed=name == "routed", **MODES[mode])
    sides = EvalData(old=[texts / "old.jsonl"])
    done = train(path, [texts / "learn.jsonl"], tmp_path / "trained", settings, eval_data=sides, run=place_of(device))
    assert done.steps == 4 and done.loss is not None and done.measured["old_nats_per_token"] > 0
    assert moved(path, done.path), "it learned"
    strip(done.path, tmp_path / "stripped")
    assert digests(tmp_path / "stripped") == digests(base)
    result = verify(done.path, base, run=RunOptions(device=device))
    held = {promise.name for promise in result.promises if promise.holds}
    assert result.passed and result.state == "trained" and {"recoverable", grown.keeps} - {None} <= held
    assert ("base_stream_always" in held) == (name in ("preserve", "routed")), "the control"


def test_a_run_goes_on_where_it_was_stopped(tmp_path: Path, texts: Path, device: str) -> None:
    path, data = grow(SHIPPED_MODEL, GROWN["preserve"], tmp_path), [texts / "learn.jsonl"]
    with pytest.raises(TrainingError, match="Continue with --resume"):
        train(
            path,
            data,
            tmp_path / "trained",
            SETTINGS,
            run=place_of(device),
            track=stopping_at(3),
        )
    start = TrainingStart(resume=True)
    done = train(path, data, tmp_path / "trained", SETTINGS, start=start, run=place_of(device))
    assert done.steps == 4
    assert verify(done.path, SHIPPED_MODEL, run=RunOptions(device=device)).passed


@pytest.mark.gpu  # it starts a process, which takes long
def test_accelerate_with_one_process(tmp_path: Path, texts: Path, device: str) -> None:
    path, output = grow(SHIPPED_MODEL, GROWN["adapt"], tmp_path), tmp_path / "trained"
    launch = "-m accelerate.commands.launch --num_processes 1 --num_machines 1 --dynamo_backend no"
    is_cpu = device == "cpu"
    command = f"--mixed_precision bf16 {'--cpu' if is_cpu else ''} -m scale_surgery train {path}"
    options = f"--data {texts / 'learn.jsonl'} -o {output} --steps 4 --sequence-length 32 --batch-size 2"
    words = [*launch.split(), *command.split(), *options.split(), *(["--device", "cpu"] if is_cpu else [])]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert moved(path, output)
    assert verify(output, SHIPPED_MODEL, run=RunOptions(device=device)).passed
    steps = [json.loads(line) for line in (output / "training" / "log.jsonl").read_text().splitlines()]
    assert steps
