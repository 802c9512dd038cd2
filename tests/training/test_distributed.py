"""Two processes: gradients, steps and whole training runs are those of one process; the base is read, not written."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from accelerate.utils.launch import prepare_multi_gpu_env
from safetensors.torch import load_file

from scale_surgery import EvalData, Request, TrainingSettings, expand, train
from scale_surgery.biographies import SHIPPED_MODEL, biography, people
from tests.conftest import load
from tests.dense_reference import dense_gradients
from tests.distributed_steps import WRAPPERS, batch, load_moved, step
from tests.modeling.test_training_modes import NO_DROPOUT, REQUESTS, autocast, check_noise, errors
from tests.tiny import save_tiny
from tests.training.test_train import write_lines

ROOT = Path(__file__).parents[2]
FSDP2 = ROOT / "docs" / "fsdp2.yaml"
# relative error of one tensor's gradient: two halves of a batch are added in another order
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
# largest difference of a trained tensor; AdamW divides by the gradient, whose last bits differ
ALLOWED_AFTER_TRAINING = 1e-4
# model: (family, request, dtype of the base, tied), and the ways in which it is wrapped; float32 expansions throughout
MODELS = {
    "preserve": (("llama", "preserve", "float32", False), ("ddp", "fsdp2", "accelerate")),
    "adapt": (("llama", "adapt", "float32", False), ("ddp", "fsdp2", "fsdp2_checkpointed", "accelerate")),
    "conv1d_tied": (("gpt2", "adapt", "float32", True), ("ddp", "fsdp2", "accelerate")),
    "without_up_stream": (("gemma3_text", "adapt_without_up_stream", "float32", True), ("ddp", "fsdp2")),
    "bfloat16_base": (("llama", "adapt", "bfloat16", False), ("ddp", "fsdp2", "fsdp2_bfloat16", "accelerate")),
}
CASES = [(model, wrapper) for model, (_, wrappers) in MODELS.items() for wrapper in wrappers]
each_case = pytest.mark.parametrize(("model", "wrapper"), CASES)


def launch_environment() -> dict[str, str]:
    """What `accelerate launch --config_file docs/fsdp2.yaml` tells the processes."""
    arguments = launch_command_parser().parse_args(
        ["--config_file", str(FSDP2), "--main_process_port", "0", "train.py"]
    )
    checked, _, _ = _validate_launch_command(arguments)
    environment = prepare_multi_gpu_env(checked)
    return {name: value for name, value in environment.items() if name.startswith(("ACCELERATE_", "FSDP_"))}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The expanded tiny models."""
    folders = {}
    for name, ((family, request, dtype, tied), _) in MODELS.items():
        folder, options = tmp_path_factory.mktemp(name), {"tie_word_embeddings": tied, **NO_DROPOUT.get(family, {})}
        base = save_tiny(folder / "base", family, dtype=getattr(torch, dtype), **options)
        asked = {**vars(REQUESTS[request]), "dtype": "float32"}
        folders[name] = expand(base, Request(**asked), folder / "expanded").path
    return folders


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model expanded, and texts to learn and to measure on."""
    folder = tmp_path_factory.mktemp("train")
    for name, start, count in (("texts", 400, 12), ("old", 0, 3)):
        write_lines(folder / f"{name}.jsonl", [{"text": biography(person, 3)} for person in people(count, start=start)])
    expand(SHIPPED_MODEL, Request("2-3", variant="adapt", collaborate="both"), folder / "expanded")
    expand(SHIPPED_MODEL, Request("2-3"), folder / "preserving")
    expand(SHIPPED_MODEL, Request("1,3", method="depth"), folder / "deep")
    return folder


def command(place: Path, output: str, *options: str, model: str = "expanded") -> list[str]:
    """The command that trains in two processes, two rows each."""
    data = ["--data", str(place / "texts.jsonl"), "--eval-data", f"old={place / 'old.jsonl'}"]
    often = "--set log_every=1 --set save_every=2 --set eval_every=2"
    words = f"--sequence-length 32 --batch-size 2 --steps 4 --learning-rate 0.003 {often}"
    return ["train", str(place / model), "-o", str(place / output), *data, *words.split(), *options]


SAMPLED = (
    *("--rehearse", "self", "--set", "rehearsal_samples=8"),
    *("--set", "rehearsal_length=16", "--set", "rehearsal_share=0.5"),
)


def rehearsing(place: Path) -> tuple[str, ...]:
    # a share that is as many rows in two processes as in one
    return ("--rehearse", str(place / "old.jsonl"), "--set", "rehearsal_weight=10", "--set", "rehearsal_share=0.5")


def make_jobs(paths: dict[str, Path], place: Path, out: Path) -> dict[str, Any]:
    """What two processes do."""
    fsdp2, stopped = launch_environment(), place / "stopped"

    cases = {f"{model}-{wrapper}": (str(paths[model]), wrapper) for model, wrapper in CASES}
    return {
        "steps": {"cases": cases, "out": str(out), "environment": fsdp2 | {"ACCELERATE_USE_FSDP": "false"}},
        "ddp": {"command": command(place, "ddp"), "environment": {}},
        "kept": {"command": command(place, "kept", "--cache-dir", str(place / "cache")), "environment": {}},
        "refused": {
            "command": command(place, "none", "--cache-dir", str(place / "none"), "--data", str(place / "none.jsonl")),
            "environment": {},
        },
        "fsdp2": {"command": command(place, "fsdp2"), "environment": fsdp2},
        "rehearsed": {"command": command(place, "rehearsed", *rehearsing(place)), "environment": fsdp2},
        "written": {"command": command(place, "written", *SAMPLED, model="preserving"), "environment": fsdp2},
        "deep": {"command": command(place, "deep-fsdp2", model="deep"), "environment": fsdp2},
        "stopped": {"command": command(place, "stopped"), "environment": fsdp2, "stop_at": 3},
        "resumed": {"command": command(place, "stopped", "--resume"), "environment": fsdp2}
        | {"listed": str(stopped), "out": str(out / "stopped.json")},
    }


@pytest.fixture(scope="module")
def done(paths: dict[str, Path], place: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a job, whose processes ended as they have to; all are done in one go."""

    out = tmp_path_factory.mktemp("distributed")
    (out / "jobs.json").write_text(json.dumps(make_jobs(paths, place, out)))
    words = [sys.executable, "-m", "tests.distributed_steps", str(out / "jobs.json")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    ended = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
    (out / "log.txt").write_text(ended.stdout + ended.stderr)
    assert ended.returncode == 0, ended.stderr

    def ask(job: str, wanted: int = 0) -> Path:
        codes = json.loads((out / "codes.json").read_text())[job]
        assert codes == [wanted, wanted], (out / "log.txt").read_text()[-5000:]
        return out

    return ask


@pytest.fixture(scope="module")
def alone(paths: dict[str, Path]) -> Callable[[str], tuple[Any, dict[str, Any]]]:
    """A model after a step on the whole batch in this process, and what the step gave."""

    @functools.cache
    def make(name: str) -> tuple[Any, dict[str, Any]]:
        model = load_moved(paths[name])
        return model, step(model, model, batch())

    return make


def test_every_wrapper_is_tested() -> None:
    assert {wrapper for _, wrapper in CASES} == set(WRAPPERS)


@pytest.mark.slow
@each_case
def test_gradients_and_step_are_those_of_one_process_and_the_base_stays(
    done: Callable[..., Path], paths: Any, alone: Any, model: str, wrapper: str
) -> None:
    """The base also as what runs: with the expansion disabled a wrapped model gives its logits."""
    record = torch.load(done("steps") / f"{model}-{wrapper}.pt")
    base = load(paths[model].parent / "base")
    for name, parameter in base.named_parameters():
        assert torch.equal(record["parameters"][name], parameter), name
    with torch.no_grad():
        assert torch.equal(record["base_logits"], base(batch()).logits)
    reference, wanted = alone(model)
    assert set(record["gradients"]) == {name for name, p in reference.named_parameters() if p.requires_grad}
    if wrapper == "fsdp2_bfloat16":
        fresh = load_moved(paths[model])
        exact = dense_gradients(fresh, batch(), batch())
        with autocast():
            noise = errors(dense_gradients(fresh, batch(), batch(), dtype=torch.float32), exact)
        check_noise(record["gradients"], exact, noise)
        return
    found_errors = errors(record["gradients"], wanted["gradients"])
    assert max(found_errors.values()) < ALLOWED[reference.dtype]
    for name, parameter in wanted["parameters"].items():
        torch.testing.assert_close(
            record["parameters"][name], parameter, rtol=0, atol=ALLOWED[reference.dtype], msg=name
        )


@pytest.mark.slow
def test_one_process_makes_tokens_and_both_learn_from_them_or_that_there_are_none(
    done: Callable[..., Path], place: Path
) -> None:
    done("kept"), done("ddp")
    (folder,) = (path for path in (place / "cache").glob("tokens/default/0.0.0/*") if path.is_dir())
    assert {file.name for file in folder.iterdir()} == {"tokens-train.arrow", "dataset_info.json"}
    shard = "expansion-default-00001-of-00001.safetensors"
    assert (place / "kept" / shard).read_bytes() == (place / "ddp" / shard).read_bytes()
    log = (done("refused", wanted=1) / "log.txt").read_text()
    assert log.count(f"{place}/none.jsonl: there is no such file") == 2 and not any((place / "none").glob("*"))


@pytest.mark.parametrize("family", ("llama", "gpt2", "gpt_neox"))
def test_fsdp2_yaml_makes_a_unit_of_each_decoder_layer(
    base_of: Any, pair_of: Any, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    for name, value in launch_environment().items():
        monkeypatch.setenv(name, value)
    plugin, model = FullyShardedDataParallelPlugin(), pair_of(family, "adapt").expanded
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward and plugin.cpu_ram_efficient_loading
    plugin.set_auto_wrap_policy(model)
    is_unit = fsdp2_prepare_auto_wrap_policy(plugin, model)
    plan = model.config.scale_surgery["base"]
    layers = model.get_submodule(f"{plan['base_model']}.{plan['layers']}")
    assert [module for module in model.modules() if is_unit(module)] == list(layers)


def trained(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("expansion-*") for name, tensor in load_file(file).items()}


def largest_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


def train_alone(place: Path, model: str, output: str, **more: Any) -> dict[str, torch.Tensor]:
    """What one process learns from the same batches."""
    settings = {"learning_rate": 0.003, "log_every": 1, "save_every": 2, "eval_every": 2, **more}
    run = TrainingSettings(steps=4, sequence_length=32, batch_size=4, **settings)
    old = EvalData([place / "old.jsonl"])
    return trained(train(place / model, [place / "texts.jsonl"], place / output, run, eval_data=old).path)


@pytest.fixture(scope="module")
def trained_alone(place: Path) -> dict[str, torch.Tensor]:
    """What one process makes of the expanded model."""
    return train_alone(place, "expanded", "alone")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_training_in_two_processes_learns_what_one_learns(
    done: Callable[..., Path], place: Path, trained_alone: dict[str, torch.Tensor], way: str
) -> None:
    done(way)
    moved = largest_difference(trained(place / "expanded"), trained_alone)
    assert largest_difference(trained(place / way), trained_alone) < ALLOWED_AFTER_TRAINING < moved / 50
    logs = [(place / name / "training" / "log.jsonl").read_text().splitlines() for name in (way, "alone")]
    for entry, wanted in zip(*(map(json.loads, lines) for lines in logs), strict=True):
        assert entry == pytest.approx(wanted, abs=1e-4)


@pytest.mark.slow
def test_two_processes_rehearse_what_one_rehearses(
    done: Callable[..., Path], place: Path, trained_alone: dict[str, torch.Tensor]
) -> None:
    """A given text, and samples of a base whose logits come from the base stream."""
    done("rehearsed"), done("written")
    rehearse = {"rehearse": (str(place / "old.jsonl"),), "rehearsal_weight": 10.0, "rehearsal_share": 0.5}
    alone = train_alone(place, "expanded", "rehearsed-alone", **rehearse)
    by_rehearsal = largest_difference(alone, trained_alone)
    # the last sequence is shorter, and a mean of two means is not that of all
    assert largest_difference(trained(place / "rehearsed"), alone) < by_rehearsal / 5
    sampled = {"rehearse": ("self",), "rehearsal_samples": 8, "rehearsal_length": 16, "rehearsal_share": 0.5}
    alone = train_alone(place, "preserving", "written-alone", **sampled)
    moved = largest_difference(trained(place / "preserving"), alone)
    assert largest_difference(trained(place / "written"), alone) < moved / 5
    lines = (place / "written" / "training" / "rehearsal.jsonl").read_text().splitlines()
    assert len(lines) == 8 and all(len(json.loads(line)["ids"]) <= 16 for line in lines)


@pytest.mark.slow
def test_duplicated_layers_learn_in_two_processes_what_they_learn_in_one(
    done: Callable[..., Path], place: Path
) -> None:
    done("deep")
    alone = train_alone(place, "deep", "deep-alone")
    moved = largest_difference(trained(place / "deep"), alone)
    assert largest_difference(trained(place / "deep-fsdp2"), alone) < ALLOWED_AFTER_TRAINING < moved / 50


@pytest.mark.slow
def test_a_stopped_run_in_two_processes_resumes_to_the_same_bits_without_a_base_tensor(
    done: Callable[..., Path], place: Path
) -> None:
    done("stopped", wanted=1), done("resumed"), done("fsdp2")
    assert largest_difference(trained(place / "stopped"), trained(place / "fsdp2")) == 0
    sizes = json.loads((done("resumed") / "stopped.json").read_text())
    kept = {name: size for name, size in sizes.items() if "checkpoint-2/" in name}
    whole = next(size for name, size in kept.items() if name.endswith("expansion.safetensors"))
    assert not [name for name in kept if "model" in name]
    # two moments of each trained number, and the numbers themselves
    assert sum(kept.values()) < 3.5 * whole


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        "torch.distributed.run --standalone --nproc-per-node 2",
        "accelerate.commands.launch --main_process_port 0 --multi_gpu --num_processes 2",
    ],
)
def test_launchers(place: Path, trained_alone: dict[str, torch.Tensor], launcher: str) -> None:
    """The commands themselves; --multi_gpu is accelerate's word for more than one process, on a CPU too."""
    output = launcher.split(".")[0]
    words = [sys.executable, "-m", *launcher.split(), "-m", "scale_surgery", *command(place, output)]
    ended = subprocess.run(words, cwd=place, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("written ") == 1, "one process speaks"
    assert largest_difference(trained(place / output), trained_alone) < ALLOWED_AFTER_TRAINING
