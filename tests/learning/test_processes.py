"""A job in several processes: its lines, how it ends when one of them ends, and that it makes what it made before."""

from __future__ import annotations

import gc
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from accelerate.commands.launch import launch_command_parser

from scale_surgery import PlanError, Request, RunOptions, TrainingError, evaluate, expand, learn, resolve_recipe
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.checkpoint.records import read_record
from scale_surgery.cli.program import main
from scale_surgery.errors import Problem
from scale_surgery.evidence.evaluate import Evaluation
from scale_surgery.learning.presets import JobFacts, with_preset
from scale_surgery.learning.processes import SIGNALS, launch_options, run_launched, unfit_type
from tests.command import run
from tests.conftest import problems, refused
from tests.interrupted_steps import FORKS, run_as_one_of
from tests.learning.test_killed import NAMED
from tests.learning.test_learn import SHORT, outputs, settings, texts  # noqa: F401  (fixtures)
from tests.training.test_distributed import ALLOWED_AFTER_TRAINING, FSDP2, ROOT, largest_difference, trained

# long enough to be killed between two checkpoints
JOB = {name: value for name, value in SHORT.items() if not name.startswith("ranking")} | {
    "training.steps": 40,
    "training.save_every": 4,
    "training.batch_size": 1,
    "expansion.layers": "last:1",
    "running.device": "cpu",
}
# torch's launcher leaves its log files open
open_files = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


@pytest.fixture
def launched() -> Iterator[Callable[..., Any]]:
    yield run_launched
    gc.collect()


def two(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in SHORT} | JOB | {"processes": 2}


def test_stages_that_train_and_measure_are_lines_for_the_launcher(settings, tmp_path):  # noqa: F811
    words = [
        "learn",
        settings["model"],
        "--data",
        settings["data"][0],
        "--layers",
        "last:1",
        "-o",
        str(tmp_path / "job"),
    ]
    two, eight = ["--multi_gpu", "--num_processes", "2"], ["--num_processes", "8"]
    sharded = {"train": ["--config_file", str(FSDP2), *eight], "evaluate": ["--multi_gpu", *eight]}
    for given, options in (
        ([], {}),
        (["--processes", "2"], {"train": two, "evaluate": two}),
        (["--processes", "8", "--accelerate-config", str(FSDP2)], sharded),
    ):
        result = run(*words, *given, "--dry-run", "--json")
        lines = {stage["name"]: stage["line"] for stage in json.loads(result.stdout)["stages"]}
        launched = [name for name, line in lines.items() if not line.startswith("scale-surgery ")]
        assert launched == list(options)
        for name, wanted in options.items():
            program, launch, *rest = shlex.split(lines[name])
            assert (program, launch, *rest[: len(wanted)]) == ("accelerate", "launch", *wanted)
            parsed = launch_command_parser().parse_args(rest)
            assert parsed.module and parsed.training_script == "scale_surgery"
            assert parsed.training_script_args[0] == name
            main.commands[name].make_context(name, parsed.training_script_args[1:])


def test_a_launcher_around_it_is_refused_with_what_to_type(settings, tmp_path, monkeypatch):  # noqa: F811
    recipe = resolve_recipe(two(settings))
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert problems(learn, recipe, tmp_path / "job", error=TrainingError) == [Problem("job-launched", processes=4)]
    assert not (tmp_path / "job").exists()


def test_settings_for_processes_that_do_not_fit_are_refused(settings, tmp_path):  # noqa: F811
    contents = [f"distributed_type: {kind}" for kind in ("'NO'", "MULTI_CPU", "DEEPSPEED")]
    contents += ["distributed_type: FSDP\nfsdp_config: {fsdp_version: 1}", "[", "num_machines: 1"]
    unfit = [tmp_path / f"{number}.yaml" for number in range(len(contents))]
    for file, text in zip(unfit, contents, strict=True):
        file.write_text(text)
    (tmp_path / "gpus.yaml").write_text("distributed_type: MULTI_GPU\n")
    assert unfit_type(FSDP2) is unfit_type(tmp_path / "gpus.yaml") is None, "the control"
    for changed, code, where in (
        ({"processes": 1, "accelerate_config": str(FSDP2)}, "config-of-one-process", "--accelerate-config"),
        ({"accelerate_config": "nowhere.yaml"}, "accelerate-config-missing", "nowhere.yaml"),
        *(({"accelerate_config": str(file)}, "accelerate-config-unfit", file) for file in unfit),
    ):
        with refused(code, where, PlanError):
            learn(resolve_recipe(two(settings) | changed), tmp_path / "job")
    with refused("value-unfit", "processes", PlanError):
        resolve_recipe(two(settings) | {"processes": 0})


def test_a_preset_counts_the_batches_of_all_processes():
    """A step of the paper has 512 sequences, and short texts leave a hundred steps."""

    def steps(processes: int, of: int) -> float:
        """Steps in so many processes, with the settings for another number of them."""
        values = with_preset("default", {}, JobFacts(16, 1024, 10**6, of))
        return values["training.epochs"] * 10**6 / (values["training.batch_size"] * processes * 1024)

    assert all(steps(count, count) >= 100 for count in (1, 2, 4))
    assert steps(4, 1) < 100, "the control"
    for count in (1, 2, 4, 64):
        values = with_preset("paper", {}, JobFacts(16, 1024, 10**6, count))
        assert values["training.batch_size"] * values["training.gradient_accumulation"] * count == 512


def test_two_processes_measure_what_one_measures(settings, tmp_path):  # noqa: F811
    """Forks take the place of what a launcher starts, so that nothing is imported again."""
    wide = expand(SHIPPED_MODEL, Request("last:1"), tmp_path / "wide").path
    words = ["evaluate", wide, "--old", settings["old"][0], "--batch-size", "25", "--device", "cpu", "-q"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = [*map(str, words), "-o", str(tmp_path / "scores.json")]
    processes = [FORKS.Process(target=run_as_one_of, args=(rank, 2, port, line)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    alone = evaluate(wide, settings["old"][0], run=RunOptions(device="cpu", batch_size=25))
    assert json.loads((tmp_path / "scores.json").read_text()) == alone.to_json()


def test_what_the_first_process_prints_is_given(monkeypatch):
    def print_ranks(given: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for rank in range(given.num_processes):
            log = Path(given.log_dir) / "any" / "attempt_0" / str(rank) / "stdout.log"
            log.parent.mkdir(parents=True)
            log.write_text(json.dumps({"rank": rank}))

    monkeypatch.setattr("accelerate.commands.launch.launch_command", print_ranks)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    assert run_launched(["inspect", "model"], launch_options(2)) == {"rank": 0}
    # libraries write to stdout as well
    for written, expected in (('NCCL version 2.21.5\n{"a": {"b": 1}}\n[W] late\n', {"a": {"b": 1}}), ("NCCL\n", None)):
        monkeypatch.setattr("scale_surgery.learning.processes._written", lambda *_, written=written: written)
        if expected is None:
            with refused("process-failed", "inspect", TrainingError):
                run_launched(["inspect", "model"], launch_options(2))
        else:
            assert run_launched(["inspect", "model"], launch_options(2)) == expected
    assert {number: signal.getsignal(number) for number in SIGNALS} == handlers


@pytest.mark.slow
@open_files
def test_evaluate_in_two_processes_gives_the_numbers_of_one(launched, settings, tmp_path):  # noqa: F811
    """Bit for bit: an odd number of batches, so that the second process has one less."""
    wide = expand(SHIPPED_MODEL, Request("last:1"), tmp_path / "wide").path
    sides = {"old": settings["old"][0], "new": settings["data"][0]}
    words = ["evaluate", wide, "--old", sides["old"], "--new", sides["new"], "--batch-size", "25", "--device", "cpu"]
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    record = launched([*words, "-o", tmp_path / "scores.json"], launch_options(2))
    assert {number: signal.getsignal(number) for number in SIGNALS} == handlers
    alone = evaluate(wide, sides["old"], sides["new"], run=RunOptions(device="cpu", batch_size=25))
    assert record == alone.to_json() == json.loads((tmp_path / "scores.json").read_text())
    assert read_record(record, Evaluation) == alone


@open_files
def test_the_first_process_that_fails_says_why(launched):
    (found,) = problems(launched, ["inspect", "nowhere/at/all"], launch_options(2), error=TrainingError)
    assert (found.code, found.where, found.values["processes"]) == ("process-failed", "inspect", 2)
    assert found.values["error"].startswith("nowhere/at/all: ") and not found.values["error"].endswith(".")


def begin(recipe: dict[str, Any], folder: Path, place: Path) -> subprocess.Popen[str]:
    """The line of a job, typed; FSDP is told that CPUs are accelerators."""
    (place / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('ACCELERATE_USE_FSDP') == 'true':\n"
        "    from tests.distributed_steps import take_fsdp_on_the_cpu\n"
        "    take_fsdp_on_the_cpu()\n"
    )
    set_ = [f"--set={name}={value}" for name, value in recipe.items() if name not in ("model", "data", "old")]
    words = ["learn", recipe["model"], "--data", recipe["data"][0], "--old", recipe["old"][0], "-o", str(folder), "-q"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{place}{os.pathsep}{ROOT}"}
    given: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    return subprocess.Popen([sys.executable, "-m", "scale_surgery", *words, *set_], cwd=place, **given)


@pytest.fixture(scope="module")
def whole(settings, tmp_path_factory) -> Path:  # noqa: F811
    """A job in two processes that nothing disturbs."""
    place = tmp_path_factory.mktemp("two")
    job = begin(two(settings), place / "job", place)
    _, errors = job.communicate()
    assert job.returncode == 0, errors
    return place / "job"


KILLS: dict[str, tuple[Callable[[psutil.Process, list[psutil.Process]], list[psutil.Process]], str]] = {
    "the_first": (lambda job, ranks: ranks[:1], "train: process 0 of 2 was ended by SIGKILL."),
    "the_second": (lambda job, ranks: ranks[1:], "train: process 1 of 2 was ended by SIGKILL."),
    "all": (lambda job, ranks: [job, *ranks], ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("kill", KILLS)
def test_killed_processes_and_the_same_line_again_make_the_same(kill, settings, whole, tmp_path):  # noqa: F811
    folder, (killed, message) = tmp_path / "job", KILLS[kill]
    job = begin(two(settings), folder, tmp_path)
    checkpoints = folder / "learned" / "training"
    while not list(checkpoints.glob("checkpoint-*/complete.json")):
        assert job.poll() is None, job.communicate()
        time.sleep(0.02)
    parent = psutil.Process(job.pid)
    for process in killed(parent, sorted(parent.children(), key=lambda rank: str(rank.environ()["RANK"]))):
        process.kill()
    _, errors = job.communicate()
    assert job.returncode == (1 if message else -signal.SIGKILL) and message in " ".join(errors.split())
    assert not json.loads((checkpoints / "settings.json").read_text()).get("finished"), "it came too late"
    second_job = begin(two(settings), folder, tmp_path)
    _, errors = second_job.communicate()
    assert second_job.returncode == 0, errors
    made, job_digests = outputs(whole), outputs(folder)
    assert job_digests.keys() == made.keys()
    assert {name for name, digest in job_digests.items() if made[name] != digest} <= NAMED


@pytest.mark.slow
def test_fsdp2_learns_what_ddp_learns_and_one_process_something_else(settings, whole, tmp_path):  # noqa: F811
    job = begin({**two(settings), "accelerate_config": str(FSDP2)}, tmp_path / "job", tmp_path)
    _, errors = job.communicate()
    assert job.returncode == 0, errors
    by_ddp = trained(whole / "learned")
    assert largest_difference(trained(tmp_path / "job" / "learned"), by_ddp) < ALLOWED_AFTER_TRAINING
    alone = learn(resolve_recipe(two(settings) | {"processes": 1}), tmp_path / "alone")
    assert alone.verified and largest_difference(trained(alone.path / "learned"), by_ddp) > ALLOWED_AFTER_TRAINING
