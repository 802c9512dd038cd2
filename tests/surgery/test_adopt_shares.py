"""Checkpoints that two processes wrote in shares: adopt says what puts them together, and takes what that gives."""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from scale_surgery import CheckpointError, Request, adopt, expand, verify
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.checkpoint.folder import open_checkpoint
from tests.conftest import problems
from tests.sharded_saves import KINDS
from tests.tiny import save_tiny
from tests.training.test_distributed import ROOT, largest_difference, launch_environment, trained

PROGRAMS = {"accelerate": "-m accelerate.commands.accelerate_cli", "python": "", "scale-surgery": "-m scale_surgery"}
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None


def typed(line: str, place: Path) -> None:
    """Run a line in a folder, as a message says it."""
    program, *words = shlex.split(line)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    given = [sys.executable, *PROGRAMS[program].split(), *words]
    ended = subprocess.run(given, cwd=place, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tied"), [*((kind, True) for kind in KINDS), ("deepspeed", False)])
def test_what_is_typed_makes_an_expanded_folder_of_it(kind: str, tied: bool, tmp_path: Path) -> None:
    if kind == "deepspeed" and not HAS_DEEPSPEED:
        pytest.skip("DeepSpeed is not installed")
    base = SHIPPED_MODEL if tied else save_tiny(tmp_path / "base", "llama", tie_word_embeddings=False)
    wide = expand(base, Request("last:1", variant="adapt"), tmp_path / "wide").path
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    environment |= launch_environment() if kind == "trainer" else {}
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    written = [*words, "-m", "tests.sharded_saves", kind, str(wide), str(tmp_path)]
    ended = subprocess.run(written, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    (problem,) = problems(adopt, tmp_path / "saved", wide, tmp_path / "out", error=CheckpointError)
    first, *others = problem.values["merge"].split("; then: ")
    others += [problem.values["adopt"].replace("EXPANDED", str(wide))]
    if problem.code == "folder-deepspeed" and tied:
        with pytest.raises(AssertionError, match="Some tensors share memory"):
            typed(first, tmp_path)
        first += " --exclude_frozen_parameters"
    for line in (first, *others):
        typed(line, tmp_path)
    expected, tensors = load_file(tmp_path / "trained.safetensors"), trained(tmp_path / "OUT")
    assert expected.keys() == tensors.keys() and tensors
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    if kind.startswith("torch"):
        consolidated = trained(adopt(tmp_path / "consolidated", wide, tmp_path / "out").path)
        assert all(torch.equal(consolidated[name], tensor) for name, tensor in expected.items())
    assert largest_difference(trained(wide), tensors) > 1e-3, "the control"
    assert verify(tmp_path / "OUT", probes=None).passed
    assert open_checkpoint(tmp_path / "OUT").tensors.keys() == open_checkpoint(wide).tensors.keys()
