"""The Trainer of transformers resumes from a local folder with custom code, in another process, without a network.

It saves code beside weights only where a class says which auto class it is for (transformers, issue 46165).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from scale_surgery import Request, RunOptions, adopt, expand, plan, verify
from scale_surgery.biographies import SHIPPED_MODEL
from tests.own_code import save_pine

# FOLDER, RUN, the checkpoint to resume from, and the step at which it is killed
SCRIPT = """
import os, signal, sys
import torch
import transformers
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

folder, run, latest, killed_at = sys.argv[1:]

class Killed(TrainerCallback):
    def on_step_begin(self, args, state, control, **options):
        if state.global_step == int(killed_at):
            os.kill(os.getpid(), signal.SIGKILL)

transformers.set_seed(0)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules."), "its own code runs"
rows = [{"input_ids": torch.arange(3 + row, 12 + row), "labels": torch.arange(3 + row, 12 + row)} for row in range(8)]
arguments = TrainingArguments(
    run, max_steps=4, save_steps=2, learning_rate=1e-2, per_device_train_batch_size=2, report_to="none", use_cpu=True,
    dataloader_pin_memory=False, disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[Killed()])
trainer.train(resume_from_checkpoint=latest == "True" or latest or None)
trainer.save_model(run)
"""


@pytest.fixture
def train_apart(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the script in a new process, offline, in a folder from which no path leads to this program or to a model."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "script.py").write_text(SCRIPT)

    def run(folder: Path, output: Path, latest: str = "", killed_at: int = -1) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(tmp_path / "home"),
            "OMP_NUM_THREADS": "1",
        }
        words = [sys.executable, str(tmp_path / "script.py"), str(folder), str(output), latest, str(killed_at)]
        return subprocess.run(words, cwd=tmp_path / "elsewhere", env=environment, capture_output=True, text=True)

    return run


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def are_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize("base", ["of_transformers", "with_own_code"])
def test_a_killed_run_resumes_to_the_same_bits(train_apart, base, tmp_path):
    """From its base's folder, and from the checkpoint alone, where no other folder is left."""
    trusted = RunOptions(device="cpu", trust_remote_code=True)
    source = SHIPPED_MODEL if base == "of_transformers" else save_pine(tmp_path / "pine")
    made = expand(source, plan(source, Request("last:1", variant="adapt"), run=trusted), tmp_path / "wide", run=trusted)
    whole, run = tmp_path / "whole", tmp_path / "run"
    ended = train_apart(made.path, whole)
    assert ended.returncode == 0, ended.stderr
    assert train_apart(made.path, run, killed_at=3).returncode == -signal.SIGKILL
    (checkpoint,) = run.glob("checkpoint-*")
    assert checkpoint.name == "checkpoint-2" and not are_equal(weights(checkpoint), weights(whole)), "the control"
    copy = shutil.copytree(run, tmp_path / "moved")
    ended = train_apart(made.path, run, "True")
    assert ended.returncode == 0, ended.stderr
    assert are_equal(weights(run), weights(whole))
    done = adopt(run / "checkpoint-4", made.path, tmp_path / "adopted")
    assert verify(done.path, probes=None, run=trusted).passed and done.steps == 4
    for folder in (run, made.path, tmp_path / "home"):
        shutil.rmtree(folder)
    ended = train_apart(copy / "checkpoint-2", copy, str(copy / "checkpoint-2"))
    assert ended.returncode == 0, ended.stderr
    assert are_equal(weights(copy), weights(whole))
