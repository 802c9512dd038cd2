"""Where a temporary file cannot be written, that is said, and not that the model is unsupported."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scale_surgery.checkpoint.files import scratch_folder
from scale_surgery.deriving.configs import config_of
from scale_surgery.errors import CheckpointError
from tests.command import run
from tests.conftest import problems
from tests.tiny import save_tiny, tiny_config


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let the system refuse to write more than so many bytes into any file, as where a disk is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_config_that_cannot_be_written():
    config = tiny_config("llama").to_dict()
    with largest_file(10):
        (problem,) = problems(config_of, config, error=CheckpointError)
    assert problem.code == "temporary-unwritten"


def test_the_command_ends_as_for_other_errors(tmp_path):
    base = save_tiny(tmp_path / "base", "llama", num_hidden_layers=5)
    with largest_file(10):
        output = run("plan", base, "--layers", "1", code=1).output
    assert "Traceback" not in output
    assert "Free some space" in " ".join(output.split()) and "not supported" not in output


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk():
    with pytest.raises(CheckpointError) as refused, scratch_folder():
        Path("/dev/full").write_text("x")
    (problem,) = refused.value.problems
    assert problem.code == "temporary-unwritten" and "No space left on device" in problem.found
    with pytest.raises(FileNotFoundError) as error, scratch_folder():
        Path("/dev/none").read_text()
    assert error.value.errno == errno.ENOENT, "another error stays what it is"
