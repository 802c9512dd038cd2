"""Training: the expansion learns, the base stays files, an interruption loses nothing, bad input stops early."""

from __future__ import annotations

import functools
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import TrainingArguments

from scale_surgery import (
    CheckpointError,
    DataError,
    EvalData,
    Probes,
    Request,
    RunOptions,
    Training,
    TrainingError,
    TrainingSettings,
    TrainingStart,
    expand,
    inspect,
    strip,
    train,
    verify,
)
from scale_surgery.biographies import SHIPPED_MODEL, people, questions
from scale_surgery.checkpoint.files import UNFINISHED
from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.errors import Problem
from scale_surgery.folder.record import read_manifest
from scale_surgery.progress import Progress, Track
from scale_surgery.running.in_memory import InMemory
from scale_surgery.training.arguments import make_arguments
from scale_surgery.training.run_folder import publish_tensors
from scale_surgery.training.settings import GROUPS
from tests.command import run
from tests.conftest import digests, load, problems, refused
from tests.each import mostly
from tests.interrupted_steps import FORKS, run_apart, run_command, train_and_die_at_the_end, train_on_a_full_disk
from tests.tiny import FAMILIES

SHORT = {"sequence_length": 32, "batch_size": 2, "learning_rate": 3e-3, "log_every": 1}
SETTINGS = TrainingSettings(steps=6, save_every=2, eval_every=3, **SHORT)


def write_lines(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def ask(start: int, count: int = 2) -> list[dict[str, Any]]:
    asked = [question for person in people(count, start=start) for question in questions(person)]
    return [{"question": question.prompt, "answer": question.answer} for question in asked]


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    """A preserve model after a short run, measured on the way."""
    sides = EvalData(old=[place / "old.jsonl"], new=[place / "new.jsonl"])
    return train(place / "preserve", [place / "texts.jsonl"], place / "trained", SETTINGS, eval_data=sides).path


RESUMED = TrainingStart(resume=True)


@pytest.fixture(scope="module")
def trained_whole(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Training]:
    """A run that nobody stopped, to compare with."""

    @functools.cache
    def make(variant: str) -> Training:
        output = tmp_path_factory.mktemp("whole") / variant
        sides = EvalData(old=[place / "old.jsonl"])
        return train(place / variant, [place / "texts.jsonl"], output, SETTINGS, eval_data=sides)

    return make


def expansion(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(path)
    planned = {tensor.name for tensor in read_manifest(path).plan.tensors}
    shards = {checkpoint.tensors[name].file for name in planned}
    tensors = {name: tensor for shard in shards for name, tensor in load_file(path / shard).items()}
    assert set(tensors) == planned, "an expansion shard holds the expansion, and all of it"
    return tensors


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def at_step(step: int, act: Callable[[], object]) -> Track:
    """A progress bar in front of which something happens when a step of the training is done, and after it."""

    @contextmanager
    def track(label: str, total: int) -> Iterator[Progress]:
        done = 0

        def advance(amount: int, note: str = "") -> None:
            nonlocal done
            done += amount
            if label == "training" and done >= step:
                act()

        yield advance

    return track


def stopping_at(step: int) -> Track:
    """A progress bar in front of which somebody presses Ctrl-C."""

    def press() -> None:
        raise KeyboardInterrupt

    return at_step(step, press)


# what training does and leaves


def test_the_base_stays_files_and_the_expansion_moves(place: Path, trained: Path) -> None:
    before, after = digests(place / "preserve"), digests(trained)
    changed = {name for name in before.keys() & after.keys() if before[name] != after[name]}
    assert changed == {"expansion-default-00001-of-00001.safetensors", "surgery.json"}
    assert set(after) - set(before) == {f"training/{name}" for name in ("settings.json", "log.jsonl", "curves.png")}
    assert set(before) <= set(after), "the index still says which shards count"
    start = expansion(place / "preserve")
    moved = {name for name, tensor in expansion(trained).items() if not torch.equal(tensor, start[name])}
    assert {name.rsplit(".", 1)[1] for name in moved} == {"w21", "w22", "up_weight"}


@pytest.mark.parametrize("files_only", [True, False])
def test_after_training_preserve_still_keeps_its_promises(trained: Path, tmp_path: Path, files_only: bool) -> None:
    result = verify(trained, probes=None if files_only else Probes(), record=False)
    promises = {promise.name: promise for promise in result.promises}
    assert result.passed and result.state == "trained"
    assert promises["recoverable"].holds
    assert promises["base_stream_always"].holds is (None if files_only else True)
    assert not promises["output_at_init"].claimed
    strip(trained, tmp_path / "base")
    assert digests(tmp_path / "base") == digests(SHIPPED_MODEL)


def test_adapt_trains_w12_and_stays_recoverable(place: Path, tmp_path: Path) -> None:
    done = train(place / "adapt", [place / "texts.jsonl"], tmp_path / "out", SETTINGS)
    start = expansion(place / "adapt")
    moved = [name for name, tensor in expansion(done.path).items() if not torch.equal(tensor, start[name])]
    assert {name.rsplit(".", 1)[1] for name in moved} == {"w12", "w21", "w22", "up_weight"}
    # seven linears in each of two layers, but q, k and v of the first: the up stream that they read is still zero
    assert sum(name.endswith("w12") for name in moved) == 2 * 7 - 3
    result = verify(done.path, record=False)
    promises = {promise.name: promise for promise in result.promises}
    assert promises["recoverable"].holds and not promises["base_stream_always"].claimed
    strip(done.path, tmp_path / "base")
    assert digests(tmp_path / "base") == digests(SHIPPED_MODEL)


def test_it_learns_and_says_what_it_forgets(place: Path, tmp_path: Path) -> None:
    settings = TrainingSettings(steps=30, **SHORT)
    sides = EvalData(old=[place / "old.jsonl"], new=[place / "new.jsonl"])
    done = train(place / "adapt", [place / "new.jsonl"], tmp_path / "out", settings, eval_data=sides)
    assert done.measured["learning"] > 0.3 and done.measured["old_accuracy"] <= 1
    entries = [json.loads(line) for line in done.log.read_text().splitlines()]
    losses = [entry["loss"] for entry in entries if "loss" in entry]
    assert len(losses) == 30 and sum(losses[-5:]) < sum(losses[:5])
    measured = [entry for entry in entries if "forgetting" in entry]
    assert [entry["step"] for entry in measured] == [0, *range(3, 31, 3)]
    assert measured[0]["forgetting"] == measured[0]["learning"] == 0, "before the first step it is the base"
    assert measured[0]["old_accuracy"] == 1.0, "the shipped model knows them"
    base, last = measured[0]["new_nats_per_token"], measured[-1]
    assert last["learning"] == pytest.approx(base - last["new_nats_per_token"])
    assert done.curves.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_base_shards_can_be_links(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "preserve", tmp_path / "in")
    done = train(
        tmp_path / "in", [place / "texts.jsonl"], tmp_path / "out", SETTINGS, start=TrainingStart(base_weights="link")
    )
    shard = "model-00001-of-00001.safetensors"
    assert (done.path / shard).samefile(tmp_path / "in" / shard)
    expansion_shard = "expansion-default-00001-of-00001.safetensors"
    assert not (done.path / expansion_shard).samefile(tmp_path / "in" / expansion_shard)


def test_a_run_is_recorded_and_can_be_followed_by_another(place: Path, trained: Path, tmp_path: Path) -> None:
    (first,) = read_manifest(trained).training
    assert first["steps"] == 6 and first["settings"]["learning_rate"] == 3e-3 and first["measured"]["step"] == 6
    next_run = train(trained, [place / "new.jsonl"], tmp_path / "again", SETTINGS)
    runs = read_manifest(next_run.path).training
    assert len(runs) == 2 and runs[0] == first and runs[1]["texts"] != first["texts"]
    assert verify(next_run.path, probes=None, record=False).passed


def test_what_was_verified_in_the_middle_of_a_run_is_other_tensors(place: Path, tmp_path: Path) -> None:
    seen = []
    verifying = at_step(5, lambda: seen.append(verify(tmp_path / "out", probes=None).recorded))
    train(place / "preserve", [place / "texts.jsonl"], tmp_path / "out", SETTINGS, track=verifying)
    assert seen and all(seen)
    summary = inspect(tmp_path / "out").expanded
    # of the second in which the run began it stays, and is known to be older
    assert summary is not None and (summary.verified is None or summary.changed_since)


def test_only_what_is_chosen_trains(place: Path, tmp_path: Path) -> None:
    settings = TrainingSettings(steps=2, groups=("w12", "head"), **SHORT)
    done = train(place / "adapt", [place / "texts.jsonl"], tmp_path / "out", settings)
    start, now = expansion(place / "adapt"), expansion(done.path)
    moved = {name for name in now if not torch.equal(now[name], start[name])}
    assert moved and {name.rsplit(".", 1)[1] for name in moved} <= {"w12", "up_weight"}
    assert "lm_head.expansions.default.up_weight" in moved and not any(
        "norm" in name or "embed" in name for name in moved
    )


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(place: Path, tmp_path: Path) -> None:
    runs = [
        train(place / "preserve", [place / "texts.jsonl"], tmp_path / str(number), TrainingSettings(steps=3, **seeded))
        for number, seeded in enumerate(({**SHORT, "seed": 1}, {**SHORT, "seed": 1}, {**SHORT, "seed": 2}))
    ]
    first, repeated, reseeded = (expansion(run.path) for run in runs)
    assert same(first, repeated) and not same(first, reseeded)


@pytest.mark.slow
def test_accumulated_batches_equal_one_batch(place: Path, tmp_path: Path) -> None:
    settings = {"sequence_length": 32, "steps": 2, "max_gradient_norm": 0.0}
    whole_run = train(
        place / "adapt", [place / "texts.jsonl"], tmp_path / "1", TrainingSettings(batch_size=4, **settings)
    )
    accumulated_run = train(
        place / "adapt", [place / "texts.jsonl"], tmp_path / "2",
        TrainingSettings(batch_size=2, gradient_accumulation=2, **settings),
    )  # fmt: skip
    start, whole, parts = (expansion(path) for path in (place / "adapt", whole_run.path, accumulated_run.path))
    for name in whole:
        torch.testing.assert_close(whole[name], parts[name], rtol=0, atol=2e-5, msg=name)
    assert not same(whole, start)


@pytest.mark.slow
def test_half_precision_is_trained_in_float32_and_stored_as_it_was(place: Path, tmp_path: Path) -> None:
    base = load(SHIPPED_MODEL, dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED_MODEL / file, tmp_path / "base" / file)
    expand(tmp_path / "base", Request("3"), tmp_path / "wide")
    seen: list[dict[str, torch.Tensor]] = []

    @contextmanager
    def looking(label: str, total: int) -> Iterator[Callable[..., None]]:
        def advance(amount: int, note: str = "") -> None:
            seen.extend(load_file(file) for file in tmp_path.glob("out/training/*/expansion.safetensors"))

        yield advance

    # steps so small that a bfloat16 number would not move by one of them
    settings = TrainingSettings(steps=6, save_every=2, **{**SHORT, "learning_rate": 1e-4})
    done = train(tmp_path / "wide", [place / "texts.jsonl"], tmp_path / "out", settings, track=looking)
    assert {tensor.dtype for tensor in expansion(done.path).values()} == {torch.bfloat16}
    assert seen and {tensor.dtype for tensor in seen[-1].values()} == {torch.float32}
    name = "model.layers.3.mlp.gate_proj.expansions.default.w21"
    assert not torch.equal(seen[-1][name], seen[-1][name].bfloat16().float()), "finer than bfloat16"
    assert verify(done.path, record=False).passed


@pytest.mark.parametrize(
    "options", mostly([{"bf16": True}, {"gradient_checkpointing": True}, {"packing": False}], {"packing": False}.__eq__)
)
def test_other_ways_to_train(place: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    settings = TrainingSettings(steps=2, **{**SHORT, "sequence_length": 256}, **options)
    done = train(place / "adapt", [place / "texts.jsonl"], tmp_path / "out", settings)
    assert verify(done.path, probes=None, record=False).state == "trained"


# interruption


@pytest.fixture(scope="module")
def stopped(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that somebody stopped, to be read."""
    output = tmp_path_factory.mktemp("stopped") / "out"
    found = problems(train, place / "preserve", [place / "texts.jsonl"], output, SETTINGS, track=stopping_at(5))
    assert found == [Problem("training-interrupted", output, step=5, kept=4)]
    return output


def test_checkpoints_hold_the_expansion_and_nothing_of_the_base(place: Path, stopped: Path) -> None:
    (checkpoint,) = (stopped / "training").glob("checkpoint-*")
    tensors = load_file(checkpoint / "expansion.safetensors")
    assert tensors.keys() == expansion(place / "preserve").keys()
    state = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
    assert sum(entry["exp_avg"].numel() for entry in state.values()) == sum(t.numel() for t in tensors.values())
    assert not [file for file in checkpoint.iterdir() if file.name.startswith(("model", "pytorch_model"))]
    assert same(expansion(stopped), tensors), "the folder is the last whole checkpoint"
    assert verify(stopped, record=False).passed


@pytest.mark.parametrize(
    ("variant", "stop"),
    mostly(product(("preserve", "adapt"), (1, 3, 5)), {("adapt", 5)}.__contains__),
)
def test_resume_gives_the_same_weights(
    place: Path, trained_whole: Callable[[str], Training], tmp_path: Path, variant: str, stop: int
) -> None:
    data, sides = [place / "texts.jsonl"], EvalData(old=[place / "old.jsonl"])
    whole = trained_whole(variant)
    with refused("training-interrupted", tmp_path / "out", TrainingError):
        train(place / variant, data, tmp_path / "out", SETTINGS, eval_data=sides, track=stopping_at(stop))
    assert not same(expansion(tmp_path / "out"), expansion(whole.path)), "the control: it had not reached the end"
    done = train(place / variant, data, tmp_path / "out", SETTINGS, eval_data=sides, start=RESUMED)
    assert same(expansion(done.path), expansion(whole.path))
    logs = [[json.loads(line) for line in run.log.read_text().splitlines()] for run in (done, whole)]
    assert logs[0] == logs[1]


def test_killed_at_any_moment_it_holds_a_whole_checkpoint(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [
        "train", str(place / "preserve"), "--data", str(place / "texts.jsonl"),
        "-o", str(out), "--steps", "1000000", "--set", "save_every=1", "--sequence-length", "32", "--batch-size", "2",
        "--set", "warmup=0", "--device", "cpu", "--quiet",
    ]  # fmt: skip
    run = FORKS.Process(target=run_command, args=(command,))
    run.start()
    try:
        deadline, index = time.monotonic() + 600, out / "model.safetensors.index.json"
        while not (index.exists() and "expansion-default-step-" in index.read_text()):
            assert run.is_alive(), f"the run ended with {run.exitcode} before a checkpoint"
            assert time.monotonic() < deadline, "no checkpoint came in ten minutes"
            time.sleep(0.02)
    finally:
        run.kill()
        run.join()
    assert verify(out, record=False).passed
    assert (out / "training" / "settings.json").is_file()
    assert not same(expansion(out), expansion(place / "preserve"))


def test_resume_refuses_what_was_begun_otherwise_and_says_what(place: Path, stopped: Path) -> None:
    data, settings = [place / "texts.jsonl"], replace(SETTINGS, batch_size=4, learning_rate=1e-3)
    assert problems(train, place / "preserve", data, stopped, settings, start=RESUMED, error=TrainingError) == [
        Problem("setting-changed", f"{stopped}: batch_size", began=2, now=4),
        Problem("setting-changed", f"{stopped}: learning_rate", began=0.003, now=0.001),
    ]
    for base, texts, what in (("preserve", "new", "texts"), ("adapt", "texts", "expansion")):
        found = problems(train, place / base, [place / f"{texts}.jsonl"], stopped, SETTINGS, start=RESUMED)
        assert ("setting-changed", f"{stopped}: {what}") in {(problem.code, problem.where) for problem in found}


def test_resume_needs_a_run_that_is_not_finished(place: Path, trained: Path, tmp_path: Path) -> None:
    data = [place / "texts.jsonl"]
    for output, code in ((tmp_path / "none", "run-missing"), (trained, "run-finished")):
        with refused(code, output, TrainingError):
            train(place / "preserve", data, output, SETTINGS, start=RESUMED)


def test_numbers_that_are_not_finite_stop_the_run_and_are_not_published(place: Path, tmp_path: Path) -> None:
    settings, data = (
        TrainingSettings(steps=6, save_every=1, **{**SHORT, "learning_rate": 1e30}),
        [place / "texts.jsonl"],
    )
    (found,) = problems(train, place / "adapt", data, tmp_path / "out", settings, error=TrainingError)
    assert (found.code, found.where, found.values["name"]) == ("loss-not-finite", f"{tmp_path / 'out'}", "the loss")
    unseen = replace(settings, steps=4, log_every=4)
    (found,) = problems(train, place / "adapt", data, tmp_path / "unseen", unseen, error=TrainingError)
    assert found.code in ("tensors-not-finite", "loss-not-finite")
    assert all(tensor.isfinite().all() for tensor in expansion(tmp_path / "unseen").values())


def test_a_measured_loss_that_is_not_finite_stops_the_run(place: Path, tmp_path: Path) -> None:
    """The loss of a step is that before it, so a measurement meets first what a step made."""
    diverging = {**SHORT, "learning_rate": 1e30, "warmup": 0.0}
    settings, data = TrainingSettings(steps=3, save_every=3, eval_every=1, **diverging), [place / "texts.jsonl"]
    for side, sides in (("new", EvalData(new=[place / "new.jsonl"])), ("old", EvalData(old=[place / "old.jsonl"]))):
        (found,) = problems(train, place / "adapt", data, tmp_path / side, settings, eval_data=sides)
        assert found.phrase == f"{tmp_path / side}: the loss on the {side} text is nan at step 1"
    # without one, the loss of the next step is met
    (found,) = problems(train, place / "adapt", data, tmp_path / "none", settings, error=TrainingError)
    assert found.phrase == f"{tmp_path / 'none'}: the loss is nan at step 2"


@pytest.mark.slow
def test_resume_after_the_last_step_does_no_further_one(place: Path, tmp_path: Path) -> None:
    data, sides = [place / "texts.jsonl"], EvalData(old=[place / "old.jsonl"])
    settings = TrainingSettings(steps=4, save_every=2, schedule="constant", **SHORT)
    whole = train(place / "adapt", data, tmp_path / "whole", settings, eval_data=sides)

    ended = run_apart(train_and_die_at_the_end, place / "adapt", *data, tmp_path / "out", settings, *sides.old)
    assert ended.returncode == 9, ended.stderr
    assert list((tmp_path / "out" / "training").glob("checkpoint-4"))
    done = train(place / "adapt", data, tmp_path / "out", settings, eval_data=sides, start=RESUMED)
    assert done.steps == 4 and same(expansion(done.path), expansion(whole.path))
    assert read_manifest(done.path).training[-1]["steps"] == 4


def test_a_state_that_cannot_be_written_ends_the_run_with_what_is_kept(place: Path, tmp_path: Path) -> None:
    """The optimizer's state is the largest file of a run, and torch writes it in C++."""
    settings = TrainingSettings(steps=2, save_every=2, **SHORT)
    wide = expand(SHIPPED_MODEL, Request("last:1", variant="adapt"), tmp_path / "wide").path
    trained = sum(tensor.numel() * 4 for tensor in expansion(wide).values())
    done = run_apart(train_on_a_full_disk, int(1.5 * trained), wide, place / "texts.jsonl", tmp_path / "out", settings)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert f"{tmp_path / 'out'}: " in done.stderr and "--resume" in done.stderr
    assert not list((tmp_path / "out" / "training").glob("checkpoint-*"))
    start = TrainingStart(resume=True, base_weights="link")
    assert train(wide, [place / "texts.jsonl"], tmp_path / "out", settings, start=start).steps == 2


def test_a_process_trains_on_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a launcher the Trainer would copy a model to each GPU that it sees."""

    def see_two(arguments: TrainingArguments) -> torch.device:
        arguments._n_gpu = 2
        return torch.device("cpu")

    seen = functools.cached_property(see_two)
    seen.__set_name__(TrainingArguments, "_setup_devices")
    monkeypatch.setattr(TrainingArguments, "_setup_devices", seen)
    settings = TrainingSettings(steps=2, **SHORT)
    made = make_arguments(settings, tmp_path, 2, RunOptions(), bf16=False, is_measured=False)
    assert made.device.type == "cpu" and made.train_batch_size == settings.batch_size == 2
    assert TrainingArguments(tmp_path, per_device_train_batch_size=2).train_batch_size == 4, "the control"


def test_the_output_cannot_be_the_input(place: Path, tmp_path: Path) -> None:
    path = place / "preserve"
    with refused("output-touches-input", path, CheckpointError):
        train(path, [place / "texts.jsonl"], path, SETTINGS)
    # a run that nobody ended, in the folder of the model that it trains
    shutil.copytree(path, tmp_path / "model")
    (tmp_path / "model" / "training").mkdir()
    (tmp_path / "model" / "training" / "settings.json").write_text(json.dumps(asdict(SETTINGS)))
    with refused("output-touches-input", tmp_path / "model", TrainingError):
        train(tmp_path / "model", [place / "texts.jsonl"], tmp_path / "model", SETTINGS, start=RESUMED)


# bad input, before any step


def test_bad_data_stops_before_anything_is_written(place: Path, tmp_path: Path) -> None:
    out, wide = tmp_path / "out", place / "preserve"
    (tmp_path / "empty.txt").write_text(" \n")
    wrong = write_lines(tmp_path / "wrong.jsonl", [{"content": "a"}, {"text": 3}])
    assert len(problems(train, wide, [tmp_path / "empty.txt"], out, SETTINGS, error=DataError)) == 1
    for data, settings, places in (
        (wrong, SETTINGS, [f"{wrong}, line 1", f"{wrong}, line 2"]),
        (tmp_path / "none.txt", SETTINGS, [f"{tmp_path / 'none.txt'}"]),
        (place / "texts.jsonl", TrainingSettings(sequence_length=300), ["--sequence-length"]),
    ):
        found = [problem.phrase for problem in problems(train, wide, [data], out, settings, error=DataError)]
        assert [text[: len(name)] for text, name in zip(found, places, strict=True)] == places
    assert not out.exists()


def test_settings_that_make_no_sense_are_named_together(place: Path, tmp_path: Path) -> None:
    settings = TrainingSettings(
        steps=0, batch_size=0, warmup=1.5, learning_rate=float("nan"), groups=("w13",), epochs=0, seed=-1
    )
    given = (place / "preserve", [place / "texts.jsonl"], tmp_path / "out")
    *others, unknown = problems(train, *given, settings, error=TrainingError)
    assert [problem.phrase.partition(" ")[0] for problem in others] == [
        *("--steps", "--epochs", "--batch-size", "--learning-rate", "warmup", "--seed")
    ]
    assert unknown == Problem("choices-unknown", "--train-only", value=["w13"], choices=GROUPS)
    settings, present = TrainingSettings(steps=1, groups=("w12",)), ["w21", "w22", "norms", "head"]
    assert problems(train, *given, settings, error=TrainingError) == [
        Problem("groups-without-tensors", place / "preserve", groups=("w12",), present=present)
    ]
    assert not (tmp_path / "out").exists()


def test_a_base_that_changed_under_the_link_is_refused(place: Path, tmp_path: Path) -> None:
    shutil.copytree(SHIPPED_MODEL, tmp_path / "base")
    expand(tmp_path / "base", Request("3"), tmp_path / "wide", base_weights="link")
    weights = load_file(tmp_path / "base" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    checkpoint = open_checkpoint(tmp_path / "base")
    with (tmp_path / "base" / "model.safetensors").open("r+b") as stream:  # another program writes through the link
        stream.seek(checkpoint.tensors[name].offset)
        stream.write(bytes([(weights[name].view(torch.uint8).flatten()[0].item() + 1) % 256]))
    (found,) = problems(train, tmp_path / "wide", [place / "texts.jsonl"], tmp_path / "out", SETTINGS)
    assert (found.code, found.where) == ("expansion-changed", f"{tmp_path / 'wide'}")
    assert found.details[0].phrase.startswith(f"{name}: ")
    assert not (tmp_path / "out").exists()


# names and shards


@pytest.mark.parametrize("family", mostly(FAMILIES, ("llama", "gpt_neox").__contains__))
def test_trained_tensors_find_their_names_on_disk(pair_of: Any, tmp_path: Path, family: str) -> None:
    pair = pair_of(family, "adapt", "float32", False)
    shutil.copytree(pair.path, tmp_path / "out")
    model = pair.load()
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * parameter.requires_grad
    tensors = {name: p.data.clone() for name, p in model.named_parameters() if p.requires_grad}
    save_file(tensors, tmp_path / "trained.safetensors")
    # what a kill leaves in the middle of a shard
    left = tmp_path / "out" / f"{UNFINISHED}x1y2z3"
    left.mkdir()
    (left / "expansion-default-step-3-00001-of-00001.safetensors").write_bytes(b"half")
    (tmp_path / "out" / "notes.tmp").write_text("a file of the base")
    stored = InMemory(model, open_checkpoint(pair.path).tensors)
    publish_tensors(tmp_path / "out", "default", tmp_path / "trained.safetensors", "step-7-", stored)
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "out")(ids).logits, model(ids).logits)
    assert [file.name for file in (tmp_path / "out").rglob("expansion-*")] == [
        "expansion-default-step-7-00001-of-00001.safetensors"
    ]
    assert (tmp_path / "out" / "notes.tmp").is_file()


def test_names_without_the_prefix_of_the_whole_model(pair_of: Any) -> None:
    model = pair_of("llama", "adapt", "float32", False).expanded
    names = (
        "layers.0.self_attn.q_proj.expansions.default.w21",
        "embed_tokens.expansions.default.up_weight",
        "layers.9.self_attn.q_proj.expansions.default.w21",
    )
    places = InMemory(model, names).places
    assert {name: place.name for name, place in places.items()} == {name: f"model.{name}" for name in names[:2]}


# the command


def test_the_command(place: Path, tmp_path: Path) -> None:
    arguments = [
        "train", place / "preserve", "--data", place / "texts.jsonl", "-o", tmp_path / "out",
        "--eval-data", f"old={place / 'old.jsonl'}", "--steps", "2", "--sequence-length", "32", "--batch-size", "2",
        "--train-only", "w21,w22,head", "--json",
    ]  # fmt: skip
    shown = json.loads(run(*arguments).stdout)
    assert shown["steps"] == 2 and shown["measured"]["step"] == 2 and shown["measured"]["old_accuracy"] == 1
    table = run(*arguments[:-1], "--overwrite")
    assert "none of the base" in table.output
    assert max(map(len, table.output.splitlines())) <= 80 + len(str(tmp_path)) * 2
    # what is read is not replaced
    kept = Path(shutil.copy(place / "old.jsonl", tmp_path / "out" / "old.jsonl"))
    told = json.loads(run(*arguments, "--overwrite", "--eval-data", f"old={kept}", code=1).stdout)
    assert [problem["code"] for problem in told["problems"]] == ["output-touches-input"] and kept.is_file()


@pytest.mark.parametrize("side", ["file.txt", "older=file.txt", "old="])
def test_the_command_explains_eval_data(place: Path, side: str) -> None:
    result = run("train", place / "preserve", "--data", place / "texts.jsonl", "--eval-data", side, code=2)
    assert "is not old=FILE or new=FILE" in result.output
