"""The whole job: what it prints is what it does, it goes on after an interrupt, and it refuses what it must."""

from __future__ import annotations

import gc
import gzip
import hashlib
import json
import re
import shlex
import shutil
import time
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pyarrow
import pytest
from datasets import Dataset
from pyarrow import ipc, parquet

from scale_surgery import (
    CheckpointError,
    Learned,
    PlanError,
    Recipe,
    TrainingError,
    learn,
    read_recipe,
    resolve_recipe,
)
from scale_surgery.biographies import SHIPPED_MODEL, biography, people, questions
from scale_surgery.checkpoint.names import JOB_FILE
from scale_surgery.errors import Problem
from scale_surgery.folder.record import read_manifest
from scale_surgery.folder.routers import describe_router
from scale_surgery.learning import estimate
from scale_surgery.learning.learn import BEFORE, PAGE_FILE, RECIPE_FILE, JobEvents, _promised, prepare, run
from scale_surgery.learning.page import _sections
from scale_surgery.learning.stages import stages_of
from scale_surgery.learning.tables import render_estimate, render_lines
from scale_surgery.progress import Progress, no_progress
from scale_surgery.running.learned_tokens import choose_new_tokens
from scale_surgery.running.options import RunOptions
from scale_surgery.running.tokenizer import need_tokenizer
from scale_surgery.text.documents import Document
from scale_surgery.training.run_folder import NEW_LOSS, read_log
from tests import command
from tests.conftest import digests, edited, problems, refused, shown
from tests.each import mostly

# short enough for a test, and each stage does something
SHORT = {
    "training.steps": 4,
    "training.batch_size": 2,
    "training.sequence_length": 64,
    "training.learning_rate": 5e-3,
    "ranking.steps": 2,
    "ranking.sequence_length": 64,
    "ranking.budget": "20%",
    "hold_out.most_characters": 1500,
}
# times and places differ from run to run; figures hold the release of their library
UNLIKE = (JOB_FILE, PAGE_FILE, RECIPE_FILE, "layers.json", ".png", "training/log.jsonl", "surgery.json")


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """New and old text."""
    folder = tmp_path_factory.mktemp("texts")
    old, new = people(12), people(8, start=400)
    asked = {
        name: [question for person in some for question in questions(person)]
        for name, some in (("old", old), ("new", new))
    }
    rows = {
        name: [{"question": question.prompt, "answer": question.answer} for question in some]
        for name, some in asked.items()
    }
    rows["new"] += [{"text": biography(person, style)} for person in new for style in range(3)]
    for name, some in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    return folder


@pytest.fixture(scope="module")
def settings(texts) -> dict[str, Any]:
    """A short job, as it is said."""
    data, old = (str(texts / f"{name}.jsonl") for name in ("new", "old"))
    return {"model": str(SHIPPED_MODEL), "data": (data,), "old": (old,)} | SHORT


def learn_words(settings: dict[str, Any], *words: str) -> list[str]:
    """The command line of a job with these texts."""
    return ["learn", settings["model"], "--data", settings["data"][0], "--old", settings["old"][0], *words]


@pytest.fixture(scope="module")
def recipe(settings) -> Recipe:
    return resolve_recipe(settings)


class Interrupt:
    """Ctrl-C at the beginning of the work with some number, and never again."""

    def __init__(self, number: int) -> None:
        self.left = number

    @contextmanager
    def __call__(self, label: str, total: int) -> Iterator[Progress]:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        yield no_progress


class EnoughError(Exception):
    """Ends a run between two stages."""


def enough(*_: Any) -> None:
    raise EnoughError


@dataclass(frozen=True)
class Done:
    """A job, the lines that it told, and what was said when it was interrupted in each of its stages."""

    learned: Learned
    lines: dict[str, str]
    interruptions: dict[str, list[Problem]]


@pytest.fixture(scope="module")
def done(recipe, tmp_path_factory) -> Done:
    """A job that was interrupted in each stage, and then ended after it; so it took two runs for each, and one more."""
    folder = tmp_path_factory.mktemp("job") / "job"
    lines: dict[str, str] = {}
    messages = {}
    for stage in [stage.name for stage in prepare(recipe, folder).estimate.stages]:
        # the first bar is that of the plan before the job
        messages[stage] = problems(learn, recipe, folder, track=Interrupt(2), error=TrainingError)
        with pytest.raises(EnoughError):
            learn(
                recipe,
                folder,
                events=JobEvents(begins=lambda name, line, number: lines.update({name: line}), ends=enough),
            )
    return Done(learn(recipe, folder), lines, messages)


def outputs(folder: Path) -> dict[str, str]:
    """Digests of what a job made, without what differs from run to run."""
    return {
        name: digest for name, digest in digests(folder).items() if not name.endswith(UNLIKE) and ".lock" not in name
    }


def test_a_job_learns_and_keeps_its_base(done, recipe):
    learned, lines = done.learned, done.lines
    assert learned.verified and list(lines) == [stage.name for stage in learned.stages]
    base, trained, routed = learned.rows
    assert (base.name, trained.name, routed.name) == ("base", "learned", "routed")
    assert trained.new.loss < base.new.loss and base.old.change is None
    # the row says what it is called: what was learned is the base's loss minus its own
    assert trained.new.change == pytest.approx(base.new.loss - trained.new.loss)
    assert routed.old.change == pytest.approx(routed.old.loss - base.old.loss)
    assert learned.layers != "auto" and learned.seconds >= sum(stage.seconds for stage in learned.stages) > 0
    assert resolve_recipe({"preset": "default"} | read_recipe(learned.path / RECIPE_FILE)) == recipe


@pytest.mark.slow
def test_a_job_adds_to_a_model_that_has_learned_before(done, settings, tmp_path):
    """What stands beside the first expansion learns alone: the first one's file keeps its bytes."""
    before = done.learned.result
    values = settings | {"model": str(before), "expansion.name": "more", "expansion.layers": "last:1"}
    learned = learn(resolve_recipe(values), tmp_path / "job")
    assert learned.verified and [row.name for row in learned.rows] == ["base", "learned", "routed"]
    made = read_manifest(learned.result)
    assert learned.router == describe_router(made.routing, list(made.expansions))
    base, trained, _ = learned.rows
    assert trained.new.loss < base.new.loss
    shards = {shard.name: shard.read_bytes() for shard in before.glob("expansion-default-*")}
    assert shards and all((learned.result / name).read_bytes() == content for name, content in shards.items())
    train = next(stage.line for stage in learned.stages if stage.name == "train")
    assert "--name more" in train
    with refused("expansion-exists", learned.result, CheckpointError):
        learn(resolve_recipe(values | {"model": str(learned.result)}), tmp_path / "again")


def test_the_page_says_it(done):
    learned, lines = done.learned, done.lines
    page = (learned.path / PAGE_FILE).read_text(encoding="utf-8")
    assert f"{learned.rows[2].old.change:+.4f}" in page and "base_stream_always" in page
    assert "accuracy" in page
    unknown = replace(learned, rows=tuple(replace(row, old=None) for row in learned.rows))
    assert [section.title for section in _sections(unknown)][:2] == ["Learning", "Promises"]
    assert page.count("scale-surgery ") >= len(lines) and "not verified" not in page.lower()


@pytest.mark.slow
def test_the_lines_typed_by_hand_make_the_same(done, tmp_path, monkeypatch):
    """Each stage is one of our commands; a job that was interrupted in each of them made what they make."""
    learned, lines = done.learned, done.lines
    monkeypatch.chdir(tmp_path)
    for line in lines.values():
        command.run(*shlex.split(line.replace(str(learned.path), "by-hand"))[1:])
    Path("by-hand/learn.json").touch()
    ours, theirs = outputs(learned.path), outputs(tmp_path / "by-hand")
    measured = {"evaluation.json", "verification.json", "report.json", "plan.json"}  # these name their folder
    assert {name: digest for name, digest in ours.items() if name not in measured} == {
        name: digest for name, digest in theirs.items() if name not in measured
    }
    scores = [
        json.loads((place / "evaluation.json").read_text())["scores"] for place in (learned.path, Path("by-hand"))
    ]
    assert scores[0] == scores[1]


def test_an_interrupt_in_any_stage_says_how_to_go_on(done):
    folder = done.learned.path
    assert done.interruptions == {stage: [Problem("stage-interrupted", folder, stage=stage)] for stage in done.lines}
    assert not list(folder.rglob("*.partial"))


def test_what_a_job_took_is_all_the_time_of_all_its_runs(done, recipe, tmp_path):
    folder = shutil.copytree(done.learned.path, tmp_path / "job", symlinks=True)
    with edited(folder / JOB_FILE) as record:
        del record["kept"]["report"], record["done"]["report"]
        record["seconds"] = 600.0
    # what came before the job was prepared counts, and an interrupted run; so the page says it too
    begun = time.monotonic()
    with refused("stage-interrupted", folder, TrainingError):
        run(prepare(recipe, folder, started=time.monotonic() - 600), track=Interrupt(1))
    assert 1200 < json.loads((folder / JOB_FILE).read_text())["seconds"] < 1200 + time.monotonic() - begun
    learned = run(prepare(recipe, folder, started=time.monotonic() - 600))
    assert 1800 < learned.seconds < 1800 + time.monotonic() - begun
    assert f">{learned.seconds / 60:.0f} min<" in (folder / PAGE_FILE).read_text(encoding="utf-8")


def test_a_finished_job_says_its_end_again_and_does_nothing(done, recipe):
    learned = done.learned
    before, begun = digests(learned.path), []
    repeated = learn(recipe, learned.path, events=JobEvents(begins=lambda name, line, number: begun.append(name)))
    assert repeated == learned and not begun
    assert {name: digest for name, digest in digests(learned.path).items() if not name.endswith(".lock")} == before


def test_what_is_gone_of_a_finished_job_is_said(done, recipe):
    learned = done.learned
    for name in ("expanded", "learn.html"):
        (learned.path / name).rename(learned.path / f"{name}.away")
    repeated = learn(recipe, learned.path)
    assert repeated.warnings[-1] == f"gone since the job was done: {learned.path / 'expanded'}, {learned.page}."
    assert replace(repeated, warnings=repeated.warnings[:-1]) == learned
    for name in ("expanded", "learn.html"):
        (learned.path / f"{name}.away").rename(learned.path / name)
    learned.result.rename(learned.path / "away")
    found = problems(learn, recipe, learned.path, error=CheckpointError)
    (learned.path / "away").rename(learned.result)
    assert found == [Problem("stage-output-gone", learned.result, stage="route")]


def test_another_recipe_and_other_texts_are_refused(done, settings, recipe, texts, tmp_path):
    learned = done.learned
    other = resolve_recipe(settings | {"training.steps": 5, "expansion.layers": "last:1"})
    assert problems(learn, other, learned.path, error=CheckpointError) == [
        Problem("setting-changed", f"{learned.path}: expansion.layers", began="auto", now="last:1"),
        Problem("setting-changed", f"{learned.path}: training.steps", began=4, now=5),
    ]
    old = (texts / "old.jsonl").read_bytes()
    (texts / "old.jsonl").write_bytes(old.swapcase())
    with refused("text-changed", texts / "old.jsonl", CheckpointError):
        learn(recipe, learned.path)
    # the same content under another time, as of a copy, is the same text
    (texts / "old.jsonl").write_bytes(old)
    assert learn(recipe, learned.path).path == learned.path


def test_a_text_that_grew_is_a_changed_text_and_no_changed_setting(settings, tmp_path):
    """More text gives a preset other settings, which nobody gave."""
    new, job = tmp_path / "new.jsonl", tmp_path / "job"
    shutil.copy(settings["data"][0], new)
    given = settings | {"data": (str(new),)}
    given = {name: value for name, value in given.items() if not name.startswith("training.")}
    with pytest.raises(EnoughError):
        learn(resolve_recipe(given), job, events=JobEvents(begins=enough))
    new.write_text(new.read_text() * 8)
    grown = resolve_recipe(given)
    assert grown.training != resolve_recipe(settings).training
    with refused("text-changed", new, CheckpointError):
        learn(grown, job)


def test_a_text_that_is_gone_of_a_folder_is_refused(settings, texts, tmp_path):
    folder, job = tmp_path / "texts", tmp_path / "job"
    folder.mkdir()
    for name in ("first", "second"):
        shutil.copy(texts / "new.jsonl", folder / f"{name}.jsonl")
    recipe = resolve_recipe(settings | {"data": (str(folder),)})
    with pytest.raises(EnoughError):
        learn(recipe, job, events=JobEvents(begins=enough))
    (folder / "second.jsonl").unlink()
    (folder / "third.jsonl").write_bytes((folder / "first.jsonl").read_bytes())
    assert problems(learn, recipe, job, error=CheckpointError) == [
        Problem("text-gone", folder / "second.jsonl", folder=job),
        Problem("text-changed", folder / "third.jsonl", folder=job),
    ]


def test_a_changed_base_byte_is_found_and_nothing_is_lost(recipe, tmp_path):
    """Between two stages somebody changes one byte of the base."""
    folder = tmp_path / "job"

    def begins(name: str, line: str, number: int) -> None:
        if name == "train":
            (shard,) = folder.glob("expanded/model*.safetensors")
            content = bytearray(shard.read_bytes())
            content[-1] ^= 1
            shard.unlink()
            shard.write_bytes(content)

    with refused("expansion-changed", folder / "expanded", CheckpointError):
        learn(recipe, folder, events=JobEvents(begins=begins))
    assert not (folder / "learned").exists() and (folder / "expanded").is_dir()


def test_a_folder_that_was_left_before_its_record_is_a_new_one(recipe, tmp_path):
    """Killed between the first writes: the same line again begins."""
    folder = tmp_path / "job"
    folder.mkdir()
    for name in BEFORE:
        (folder / name).touch()
    with pytest.raises(EnoughError):
        learn(recipe, folder, events=JobEvents(begins=enough))
    assert (folder / JOB_FILE).is_file()


def test_a_job_that_has_to_go_goes_whole(recipe, tmp_path, monkeypatch):
    """Interrupted while it goes, it goes in the next run: nothing of it is taken for the new job's."""
    folder = tmp_path / "job"
    with pytest.raises(EnoughError):
        learn(recipe, folder, events=JobEvents(begins=enough))
    (folder / "learned").mkdir()
    other_recipe = replace(recipe, training=replace(recipe.training, steps=5))
    remove = shutil.rmtree

    def interrupted(place: Path, **given: Any) -> None:
        if Path(place).parent == folder:
            raise KeyboardInterrupt
        remove(place, **given)

    with monkeypatch.context() as patch, refused("job-interrupted", folder, TrainingError):
        patch.setattr(shutil, "rmtree", interrupted)
        learn(other_recipe, folder, overwrite=True)
    assert (folder / "learned").is_dir()
    with refused("setting-changed", f"{folder}: training.steps", CheckpointError):
        learn(recipe, folder)
    with pytest.raises(EnoughError):
        learn(other_recipe, folder, events=JobEvents(begins=enough))
    assert not (folder / "learned").exists()


def test_a_second_run_and_a_changed_record_are_refused(recipe, tmp_path):
    folder = tmp_path / "job"
    again = JobEvents(begins=lambda name, line, number: learn(recipe, folder))
    with refused("output-busy", folder, CheckpointError):
        learn(recipe, folder, events=again)
    (folder / JOB_FILE).write_text('{"format": 1}')
    with refused("job-record-unfit", folder / JOB_FILE, CheckpointError):
        learn(recipe, folder)


def test_a_run_of_another_number_of_processes_is_not_taken(done, recipe, tmp_path):
    """As a configuration of accelerate may start it; the record of the job would say otherwise."""
    folder = Path(shutil.copytree(done.learned.path, tmp_path / "job"))
    with edited(folder / JOB_FILE) as record:
        names = list(record["kept"])
        for name in names[names.index("train") :]:
            del record["kept"][name]
            record["done"].pop(name, None)
    with edited(folder / "learned" / "training" / "settings.json") as settings_:
        settings_["processes"] = 2
    with refused("job-of-other-processes", folder / "learned", TrainingError):
        learn(recipe, folder)


def test_places_that_are_not_ours_are_refused(recipe, texts, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    (tmp_path / "file").write_text("")
    for place, code in (
        (tmp_path / "mine", "output-no-job"),
        (tmp_path / "file", "output-is-file"),
        (texts, "output-touches-input"),
        (SHIPPED_MODEL / "job", "output-touches-input"),
    ):
        found = problems(learn, recipe, place, overwrite=True, error=CheckpointError)
        assert (code, f"{place}") in [(problem.code, problem.where) for problem in found]
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"


@pytest.mark.parametrize(
    "values",
    [
        {"tokens.token_file": "FILE"},
        {"training.rehearse": ["FILE"]},
        {"training.rehearse": ["self"], "training.rehearsal_prompts": "FILE"},
        {"processes": 2, "accelerate_config": "FILE"},
    ],
)
def test_a_job_that_begins_anew_removes_no_file_that_it_reads(values, settings, tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / JOB_FILE).write_text("{}")
    file = folder / "mine.txt"
    file.write_text("distributed_type: MULTI_GPU\n")
    said = json.loads(json.dumps(values).replace("FILE", str(file)))
    recipe = resolve_recipe(settings | {"expansion.layers": "last:1"} | said)
    assert problems(learn, recipe, folder, events=JobEvents(begins=enough), overwrite=True, error=CheckpointError) == [
        Problem("output-touches-input", folder, input=str(file))
    ]
    assert file.read_text() == "distributed_type: MULTI_GPU\n"


def test_memory_that_is_short_is_said_before(recipe, tmp_path, monkeypatch):
    assert not any("free memory" in note for note in prepare(recipe, tmp_path / "job").estimate.notes), "the control"
    monkeypatch.setattr(psutil, "virtual_memory", lambda: namedtuple("Memory", "available")(10**6))
    (note,) = [note for note in prepare(recipe, tmp_path / "job").estimate.notes if "free memory" in note]
    assert note.startswith("cpu has 1.0 MB of free memory, and the largest stage takes about ")


def test_a_full_disk_is_refused_before_anything_is_written(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: namedtuple("Usage", "total used free")(10, 9, 1))
    with refused("job-without-space", tmp_path / "job", CheckpointError):
        learn(recipe, tmp_path / "job")
    assert not (tmp_path / "job").exists()


def test_a_dry_run_shows_all_stages_and_the_room_that_is_missing(settings, tmp_path, monkeypatch):
    words = learn_words(settings, "-o", str(tmp_path / "job"), "--dry-run")
    assert "missing" not in command.run(*words).output, "the control: there is room"
    monkeypatch.setattr(shutil, "disk_usage", lambda place: namedtuple("Usage", "total used free")(10, 9, 1))
    shown = command.run(*words).output
    said = " ".join(shown.split())
    assert re.search(r"missing: about [\d,]+ bytes are needed, 1 are free\. Free some space", said)
    lines = [line for line in shown.splitlines() if line.startswith("scale-surgery ")]
    assert len(lines) == 10 and f"plan {SHIPPED_MODEL} --layers last:1 " in lines[2]
    estimate = json.loads(command.run(*words, "--json").output)
    assert estimate["missing_bytes"] == estimate["disk_bytes"] - 1 and len(estimate["stages"]) == 10
    assert not (tmp_path / "job").exists()


def test_gates_without_rehearsal_are_refused_before_anything_is_written(settings, tmp_path):
    gated = resolve_recipe(settings | {"expansion.variant": "gated", "expansion.collaborate": "both"})
    with refused("gates-without-rehearsal", gated.model, TrainingError):
        learn(gated, tmp_path / "job")
    assert not (tmp_path / "job").exists()


def test_the_page_says_of_each_promise_what_came_out():
    for claimed, holds, expected in (
        (True, True, "holds: 3 tokens"),
        (True, False, "BROKEN: 3 tokens"),
        (True, None, "not checked: 3 tokens"),
        (False, None, "not claimed"),
        (False, False, "not claimed"),
    ):
        assert _promised({"claimed": claimed, "holds": holds, "evidence": "3 tokens"}) == expected


def test_help_names_no_default_that_a_preset_changes():
    text = " ".join(command.run("learn", "--help").output.split())
    assert text.count("[default: from the preset") == 2 and text.count("[default: from the width of the model") == 1


def test_tokens_are_learned_of_the_text_to_learn_without_what_is_set_aside(settings, tmp_path):
    wanted = {
        "tokens.token_texts": settings["data"],
        "tokens.token_count": 30,
        "expansion.layers": "none",
        "route": False,
    }
    done = learn(resolve_recipe(settings | wanted), tmp_path / "job")
    made = json.loads((tmp_path / "job" / "plan.json").read_text("utf-8"))["request"]["new_tokens"]
    learned, whole = (
        choose_new_tokens(SHIPPED_MODEL, [text], 30, 1152).new_tokens
        for text in (tmp_path / "job" / "texts-new" / "learn.jsonl", *settings["data"])
    )
    assert tuple(made["tokens"]) == learned.tokens != whole.tokens
    scores = json.loads((tmp_path / "job" / "evaluation.json").read_text("utf-8"))["scores"]
    base, trained = scores[0]["new"], scores[1]["new"]
    assert trained["scored"] < base["scored"] and trained["bytes"] == base["bytes"]
    assert scores[1]["learning"] == (base["nats"] - trained["nats"]) / base["scored"]
    assert done.verified


@pytest.mark.slow
def test_without_old_text_and_without_a_router(settings, tmp_path):
    values = {name: value for name, value in settings.items() if name != "old"}
    recipe = resolve_recipe(values | {"expansion.layers": "last:1", "route": False})
    learned = learn(recipe, tmp_path / "job")
    assert [row.name for row in learned.rows] == ["base", "learned"] and learned.rows[1].old is None
    assert learned.router is None and "nothing is known of what was forgotten" in learned.warnings[-1]
    assert [stage.name for stage in learned.stages] == [
        *("texts-new", "plan", "expand", "train", "evaluate", "verify", "report")
    ]


def test_a_job_whose_loss_rose_stops_after_the_training(done, settings, tmp_path):
    shorter = {"expansion.layers": "last:1", "training.learning_rate": 0.5, "training.steps": 6}
    rising = resolve_recipe(settings | shorter)
    stopped = tmp_path / "job" / "learned"
    told = [problems(learn, rising, tmp_path / "job", error=TrainingError) for _ in range(2)]
    (found,) = told[0]
    assert (found.code, found.where) == ("loss-rose", f"{stopped}")
    assert found.values["before"] < found.values["after"] and found.values["lower"] == 0.1
    assert found.values["curves"].is_file()
    assert told[0] == told[1], "the same line again goes no further"
    assert not (tmp_path / "job" / "routed").exists()
    assert "train" not in json.loads((tmp_path / "job" / JOB_FILE).read_text())["kept"]
    # the control: at 0.005 it fell, and the job went on
    fell = [
        entry[NEW_LOSS] for entry in read_log(done.learned.path / "learned/training/log.jsonl") if NEW_LOSS in entry
    ]
    assert fell[-1] < fell[0] and (done.learned.path / "routed").exists()


def test_what_is_given_to_measure_on_is_not_set_aside(settings, texts, tmp_path):
    given = {}
    for name, text in (("measure_new", "new"), ("measure_old", "old")):
        given[name] = (str(shutil.copy(texts / f"{text}.jsonl", tmp_path / f"{text}-too.jsonl")),)
    layers = {"expansion.layers": "last:1"}
    both = prepare(resolve_recipe(settings | given | layers), tmp_path / "job").work
    assert (both.new_parts, both.old_parts) == (("calibrate",), ("calibrate",))
    alone = prepare(resolve_recipe({**settings, **given, **layers, "route": False}), tmp_path / "job")
    assert [stage.name for stage in alone.estimate.stages][:2] == ["plan", "expand"]
    assert f"--data {settings['data'][0]} " in alone.estimate.stages[2].line
    neither = prepare(resolve_recipe(settings | layers), tmp_path / "job").work
    assert neither.new_parts == neither.old_parts == ("calibrate", "measure"), "the control"


def test_what_cannot_be_routed_gets_no_router(settings, tmp_path):
    # without a router half of the new text is still left to learn
    changes = {"expansion.method": "depth", "expansion.layers": "last:1", "hold_out.share": 0.5}
    recipe = resolve_recipe(settings | changes)
    job = prepare(recipe, tmp_path / "job")
    assert "route" not in [stage.name for stage in stages_of(job.work)]
    assert job.estimate.notes[0] == f"no router: {Problem('deepened-not-routed')}"
    assert not (tmp_path / "job").exists()


def test_what_does_not_fit_the_model_is_said_first(settings, tmp_path):
    for name, value, option in (
        ("expansion.layers", "7", "--layers"),
        ("training.sequence_length", 10**6, "--sequence-length"),
    ):
        (found,) = problems(prepare, resolve_recipe(settings | {name: value}), tmp_path / "job")
        assert found.phrase.startswith(option)


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (("--set", "routing.router=cosine", "--set", "routing.switch_rate=0.1"), "--switch-rate"),
        (("--set", "training.groups=w99"), "--train-only"),
        (("--set", "training.groups=[]"), f"{SHIPPED_MODEL}: nothing would train"),
        (("--set", "training.groups=w12", "--set", "expansion.variant=preserve"), f"{SHIPPED_MODEL}: nothing would"),
        (("--set", "training.groups=attn"), f"{SHIPPED_MODEL}: nothing would train"),
        (("--device", "nonsense"), "--device is 'nonsense'"),
        (("--device", "hpu"), "--device is hpu"),
        (("--layers", "auto", "--budget", "0.01%"), "--budget is 0.01%"),
        (
            ("--layers", "auto", "--budget", "20%", "--set", "expansion.collaborative_layers=0"),
            "--collaborative-layers is 0",
        ),
        (("--layers", "auto", "--budget", "20%", "--set", "ranking.sequence_length=5000"), "--sequence-length is 5000"),
        (("--set", "training.routed=true"), "training.routed is True"),
        (("--set", "training.base_quantization=nf4", "--set", "expansion.method=depth"), f"{SHIPPED_MODEL}: "),
        (("--set", "training.base_quantization=nf4", "--trust-remote-code"), "--base-quantization is nf4"),
        (("--data", "COPY", "--new-tokens-from", "COPY", "--count", "3"), "--new-tokens-from names some"),
        (("--rehearse", "nosuch.txt"), "nosuch.txt: "),
        (("--rehearse", "self", "--set", "training.rehearsal_prompts=nosuch.txt"), "nosuch.txt: "),
        (("--rehearse", "self", "--rehearse", "OLD"), "--rehearse is self, "),
        (("--rehearse", "OLD"), "OLD is named by --old, to measure or calibrate on, and by --rehearse too"),
        (("--data", "OLD"), "OLD is named by --old, to measure or calibrate on, and by --data too"),
        # a folder that has it, and the same file with an option
        (("--data", "FOLDER"), "OLD is named by --old, to measure or calibrate on, and by --data too"),
        (("--rehearse", "OLD,column=text"), "OLD is named by --old, to measure or calibrate on, and by --rehearse too"),
        (("--set", "hold_out.share=0.5"), "hold_out.share is 0.5 for each of 2 parts"),
        (("--new-tokens", "nosuch.txt"), "nosuch.txt: "),
        (("--new-tokens", "OLD", "--new-tokens-from", "OLD"), "--new-tokens and --new-tokens-from: "),
    ],
)
def test_what_a_later_stage_would_refuse_is_said_first(words, place, settings, tmp_path):
    job = ("--layers", "last:1", "-o", str(tmp_path / "job"), "--dry-run")
    old = settings["old"][0]
    copied = shutil.copy(settings["data"][0], tmp_path / "copy.jsonl")
    named = {"OLD": old, "OLD,column=text": f"{old},column=text", "FOLDER": str(Path(old).parent), "COPY": copied}
    given = (named.get(word, word) for word in words)
    said = " ".join(command.run(*learn_words(settings, *job, *given), code=1).output.split())
    assert said.startswith(f"error: {place.replace('OLD', settings['old'][0])}")
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"routing.router": "cosine", "expansion.variant": "preserve"}, "router: cosine compares the base logits"),
        ({"routing.router": "cosine", "calibration.bound": 1.0}, "--bound is 1, and the cosine router has no bound"),
    ],
)
def test_a_router_that_does_not_go_with_the_expansion_is_refused_first(values, message, settings, tmp_path):
    recipe = resolve_recipe(settings | {"expansion.layers": "last:1"} | values)
    with pytest.raises(PlanError, match=message):
        prepare(recipe, tmp_path / "job")


def test_all_that_later_stages_would_refuse_is_said_at_once(settings, tmp_path):
    wrong = {"routing.router": "cosine", "routing.switch_rate": 0.1, "training.groups": ("w99",)}
    recipe = resolve_recipe(settings | wrong | {"training.routed": True, "tokens.token_file": "nosuch.txt"})
    found = [problem.phrase for problem in problems(learn, recipe, tmp_path / "job", error=PlanError)]
    assert [text.split(" ")[0] for text in found] == ["--switch-rate", "--train-only", "nosuch.txt:", "training.routed"]
    # without a router nothing is asked of its numbers
    unrouted = resolve_recipe(settings | {"routing.router": "cosine", "routing.switch_rate": 0.1, "route": False})
    assert not prepare(unrouted, tmp_path / "job").work.routes


def test_the_estimate_is_of_the_right_size(done, recipe, tmp_path):
    learned = done.learned
    estimate = prepare(recipe, tmp_path / "job").estimate
    assert [stage.name for stage in estimate.stages] == [stage.name for stage in learned.stages]
    files = {file.stat().st_ino: file.stat().st_size for file in learned.path.rglob("*") if file.is_file()}
    size = sum(files.values())
    assert size / 4 < estimate.disk_bytes < 4 * size
    assert estimate.free_bytes > estimate.disk_bytes and 10**8 < estimate.memory_bytes < 10**10


def test_own_samples_are_forecast_in_tokens_and_time(settings, tmp_path):
    def sampled(running: RunOptions = RunOptions(), **changes: Any) -> tuple[Any, str]:
        given = {"training.rehearse": ("self",), "training.batch_size": 1, "training.steps": 3, **changes}
        asked = replace(resolve_recipe(settings | given), running=running)
        made = prepare(asked, tmp_path / "job").estimate
        return made.to_sample, " ".join(shown(render_estimate(made)).split())

    few, said = sampled()
    assert few is not None and (few.texts, few.tokens) == (800, 3 * settings["training.sequence_length"] // 2)
    assert few.seconds is not None and 0 < few.seconds < 60
    assert re.search(r"to sample about \d+ tokens from the base, at most 800 texts; about \d+ s", said)
    many, _ = sampled(**{"training.rehearsal_samples": 5, "training.rehearsal_length": 16})
    assert many is not None and (many.texts, many.tokens) == (5, 80)
    large, said = sampled(RunOptions(memory_bytes=1000))
    assert large is not None and large.seconds is None and "; time unknown before the first batch" in said
    none, said = sampled(**{"training.rehearse": ()})
    assert none is None and "to sample" not in said


@pytest.mark.parametrize(("budget", "layers"), [("20%", None), ("400%", "all")])
def test_a_pilot_runs_only_where_the_budget_leaves_a_choice(budget, layers, settings, tmp_path):
    job = prepare(resolve_recipe(settings | {"ranking.budget": budget}), tmp_path / "job")
    chooses = budget == "20%"
    stages = {stage.name: stage for stage in job.estimate.stages}
    assert ("layers" in stages) is chooses and (f"--layers {layers} " in stages["plan"].line) is not chooses
    said = " ".join(shown(render_lines(job.estimate)).split())
    assert ("note: the pilot chooses the value of --layers" in said) is chooses
    assert job.estimate.notes == (() if chooses else ("no pilot: --budget 400% pays for all layers",))


@pytest.mark.parametrize(("documents", "epochs", "about"), [(1000, 1.0, "at least"), (999, 10.0, "about")])
def test_a_dataset_whose_end_nobody_knows_is_read_once(documents, epochs, about, settings, tmp_path, monkeypatch):
    """Of a dataset of the Hub only the first 1,000 documents are counted."""
    kept = [Document("", f"A short text about {number} things.", "org/name") for number in range(documents)]
    monkeypatch.setattr(estimate, "read_text", lambda text: iter(kept))
    recipe = resolve_recipe({"model": settings["model"], "data": "org/name", "expansion.layers": "last:1"})
    assert (recipe.training.epochs, recipe.training.batch_size) == (epochs, 8)
    made = prepare(recipe, tmp_path / "job").estimate
    assert re.search(rf"to read +{about} [\d.]+ k tokens", shown(render_estimate(made)))


def write_rows(rows: Dataset, path: Path) -> None:
    """Write rows in the form that the name of a file or a folder says."""
    match path.suffix:
        case ".jsonl":
            rows.to_json(path)
        case ".json":
            path.write_text(json.dumps(rows.to_list()))
        case ".csv":
            rows.to_csv(path)
        case ".parquet":
            parquet.write_table(pyarrow.Table.from_pylist(rows.to_list()), path, compression="zstd")
        case ".arrow":
            table = pyarrow.Table.from_pylist(rows.to_list())
            new = ipc.new_stream if path.stem.endswith("stream") else ipc.new_file
            with new(path, table.schema) as writer:
                writer.write_table(table, 500)
        case ".txt":
            path.write_text("".join(text.replace("\n", " ") + "\n" for text in rows["text"]))
        case _:
            rows.save_to_disk(path)


# datasets leaves a table open that is not read to its end
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize(
    ("name", "in_files"),
    mostly(
        [
            *((name, 1) for name in ("a.jsonl", "a.json", "a.csv", "a.parquet", "file.arrow", "stream.arrow", "saved")),
            *((name, 3) for name in ("a.jsonl", "a.csv", "a.parquet", "stream.arrow", "a.txt")),
        ],
        # each form once
        lambda case: (case[1] == 3) == (case[0] in ("a.csv", "a.parquet", "a.txt")),
    ),
)
def test_a_text_behind_the_sample_is_counted_by_its_rows(name, in_files, tmp_path):
    """Whatever else stands in a row, and however it is packed: of a text of 6,000 documents 1,000 are read."""
    texts = [f'A short text\nabout {number % 89} "things".' for number in range(6000)]
    others = [hashlib.sha512(text.encode()).hexdigest() * 9 for text in texts]
    rows, path = Dataset.from_dict({"text": texts, "other": others}), tmp_path / name
    if in_files == 1:
        write_rows(rows, path)
    else:
        path = tmp_path / "folder"
        path.mkdir()
        (path / "README.md").write_text("---\nlicense: mit\n---\n" + "Rows." * 10_000)
        for number in range(3):
            write_rows(rows.select(range(2000 * number, 2000 * number + 2000)), path / f"{number}-{name}")
    tokenizer = need_tokenizer(SHIPPED_MODEL, "model", RunOptions())
    count = estimate.count_tokens([str(path)], tokenizer)
    gc.collect()
    assert not count.is_least
    assert count.tokens == pytest.approx(len(tokenizer("\n".join(texts))["input_ids"]), rel=0.15)


def test_a_text_whose_end_is_not_known_has_at_least_what_was_read(tmp_path):
    lines = "".join(json.dumps({"text": f"A short text about {number}."}) + "\n" for number in range(1500))
    (tmp_path / "text.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    assert estimate.count_tokens([str(tmp_path)], need_tokenizer(SHIPPED_MODEL, "model", RunOptions())).is_least


def test_the_command_shows_what_it_would_do(settings, tmp_path):
    words = ("--layers", "last:1", "-o", str(tmp_path / "job"), "--dry-run")
    result = command.run(*learn_words(settings, *words))
    assert "tokens" in result.output and not re.search(r"\d (s|min)\b|a second|\btime\b", result.output)
    assert f"scale-surgery expand {settings['model']} --plan" in result.output
    assert not (tmp_path / "job").exists()


def test_a_command_that_meets_the_folder_of_a_job_says_where_the_models_are(done):
    folder = done.learned.path
    assert " ".join(command.run("verify", folder, code=1).output.split()) == (
        f"error: {folder}/config.json: not found. This is a job of scale-surgery learn, whose models are: "
        f"{folder}/expanded, {folder}/learned, {folder}/routed."
    )


def test_the_command_goes_on_and_ends_with_a_table(done, settings):
    learned = done.learned
    given = [f"--set={name}={value}" for name, value in settings.items() if name in SHORT]
    words = learn_words(settings, "-o", str(learned.path), *given)
    result = command.run(*words)
    assert "verified" in result.output and f"chat {learned.result}" in result.output.replace("\n", "")
    plain = json.loads(command.run(*words, "--json").stdout)
    assert plain["verified"] and [row["name"] for row in plain["rows"]] == ["base", "learned", "routed"]
