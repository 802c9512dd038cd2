"""Whole or absent: what a kill, a full disk or a second process leaves behind, and that a second run completes it."""

from __future__ import annotations

import signal
import sys

import pytest

from scale_surgery.checkpoint.staging import staged
from scale_surgery.errors import CheckpointError
from scale_surgery.planning.request import Request
from scale_surgery.surgery.expand import expand
from tests.conftest import DEEPENED, digests, refused
from tests.each import mostly
from tests.interrupted_steps import SHARD_BYTES, expand_on_a_full_disk, run_apart, run_killed

REQUEST = Request("1-2", variant="adapt", collaborate="both", init_w22="random", up_width=20)


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(sys.modules["scale_surgery.planning.plan"], "SHARD_BYTES", SHARD_BYTES)


KILLS = (
    ("new tensors", 3, REQUEST),
    ("new tensors", 40, REQUEST),
    ("base shards", 0, REQUEST),
    ("base shards", 2, REQUEST),
    ("base shards", 2, DEEPENED),
    ("base hashes", 0, REQUEST),
    ("rename", 0, REQUEST),
)


@pytest.mark.parametrize(("label", "count", "request_"), mostly(KILLS, (KILLS[2], KILLS[4]).__contains__))
def test_a_killed_expansion_leaves_no_target_and_a_second_run_completes_it(
    base_of, tmp_path, small_shards, label, count, request_
):
    base = base_of("llama", tied=True)
    before, target, partial = digests(base), tmp_path / "out" / "expanded", tmp_path / "out" / "expanded.partial"
    done = run_killed(label, count, request_, base, target)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not target.exists()
    assert digests(base) == before
    finished = {file: file.stat().st_mtime_ns for file in partial.glob("expansion-*.safetensors")}
    assert bool(finished) == ((label, count) != ("new tensors", 3)), "the kill falls where it is meant to"

    expand(base, request_, target)
    undisturbed = expand(base, request_, tmp_path / "undisturbed")
    assert len(undisturbed.plan.shards) > 2
    assert digests(target) == digests(undisturbed.path)
    assert [file.name for file in target.parent.iterdir()] == ["expanded"], "nothing else is left behind"
    for file, written in finished.items():
        assert (target / file.name).stat().st_mtime_ns == written, "a finished shard is not made again"


def test_another_request_starts_clean(base_of, tmp_path, small_shards):
    base, target = base_of("llama"), tmp_path / "out" / "expanded"
    assert run_killed("base shards", 0, REQUEST, base, target).returncode == -signal.SIGKILL
    left = tmp_path / "out" / "expanded.partial"
    (left / "stray.txt").write_text("from the interrupted run")
    request = Request("0", init_w22="random", seed=7)
    expand(base, request, target)
    assert digests(target) == digests(expand(base, request, tmp_path / "undisturbed").path)


def test_overwrite_keeps_the_old_target_until_the_new_one_is_whole(base_of, tmp_path, small_shards):
    base, target = base_of("llama"), tmp_path / "expanded"
    expand(base, Request("0"), target)
    old = digests(target)
    for label in ("new tensors", "base hashes", "rename"):
        assert run_killed(label, 0, REQUEST, base, target).returncode == -signal.SIGKILL
        assert digests(target) == old
    expand(base, REQUEST, target, overwrite=True)
    assert digests(target) == digests(expand(base, REQUEST, tmp_path / "undisturbed").path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["expanded", "undisturbed"]


def test_two_processes_cannot_write_the_same_target(base_of, tmp_path):
    with staged(tmp_path / "out", {}, overwrite=False):
        with refused("output-busy", tmp_path / "out"), staged(tmp_path / "out", {}, overwrite=False):
            pass
        done = run_killed("rename", 0, REQUEST, base_of("llama"), tmp_path / "out")
        assert done.returncode == 1 and "out: another process is writing it. Wait until it is done" in done.stderr
    assert (tmp_path / "out").is_dir()


def test_a_target_that_appears_meanwhile_is_not_replaced(tmp_path):
    target = tmp_path / "out"
    with (
        refused("output-appeared", target, CheckpointError),
        staged(target, {}, overwrite=False) as partial,
    ):
        (partial / "ours").write_text("x")
        target.mkdir()
        (target / "theirs").write_text("y")
    assert [file.name for file in target.iterdir()] == ["theirs"]


@pytest.mark.parametrize(
    ("limit", "layers", "file"), ((30_000, "all", "expansion-default-00001"), (100_000, "0", "model.safetensors"))
)
def test_a_file_that_cannot_be_written_is_an_error_and_no_target(base_of, tmp_path, limit, layers, file):
    """The first limit stops the new shard, which safetensors writes, the second a base shard, which is copied."""
    base, target = base_of("llama"), tmp_path / "expanded"
    done = run_apart(expand_on_a_full_disk, limit, Request(layers), base, target)
    assert done.returncode == 1
    assert f"{target}: not written, File too large" in done.stderr
    assert file in done.stderr
    assert "a second run continues from what is finished in expanded.partial" in done.stderr
    assert "Traceback" not in done.stderr
    assert not target.exists()
    expand(base, Request(layers), target)
