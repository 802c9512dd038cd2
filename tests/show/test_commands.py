"""Commands that are printed: what is typed again fills the same dataclasses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from scale_surgery import Request, RunOptions, expand
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.cli.program import main
from scale_surgery.command_lines import changed_options
from scale_surgery.training.settings import TrainingSettings
from tests.command import run
from tests.conftest import shake
from tests.surgery.test_own_code import save_speaking


def proposed(text: str) -> list[str]:
    """The words of the command that comes next, without the program's name."""
    name, program, *words = shlex.split(text.splitlines()[-1])
    assert (name, program) == ("next", "scale-surgery")
    return words


def test_options_that_are_said_fill_the_same_settings():
    settings = TrainingSettings(
        packing=False,
        bf16=False,
        groups=("w12", "w21"),
        rehearse=("a,column=b", "c d.txt"),
        learning_rate=2e-3,
        gradient_checkpointing=True,
        steps=3,
        schedule="cosine",
        warmup=1e-5,
        save_every=7,
        rehearsal_prompts="a: b #c.txt",
    )
    words = list(changed_options(settings, TrainingSettings()))
    options = main.commands["train"].make_context("train", ["folder", "--data", "x", *words]).params
    given = {name: options[name] for name in vars(settings) if options.get(name) is not None}
    usual = vars(TrainingSettings())
    assert given == {name: value for name, value in vars(settings).items() if value != usual[name]}
    assert [word for word in words if word.startswith("save")] == ["save_every=7"], "after --set"


@pytest.mark.parametrize("layers", (["--layers", "last:1"], []))
@pytest.mark.parametrize("learned", (False, True))
def test_what_plan_proposes_adds_the_same_tokens(tmp_path: Path, layers: list[str], learned: bool) -> None:
    (tmp_path / "tokens.txt").write_text("Xylophone\nglockenspiel\n")
    (tmp_path / "text.txt").write_text("The glockenspiel and the Xylophone are bright. " * 20)
    source = ["--new-tokens-from", tmp_path / "text.txt", "--count", "2"]
    source = source if learned else ["--new-tokens", tmp_path / "tokens.txt"]
    text = run("plan", SHIPPED_MODEL, *layers, *source).stdout
    words = proposed(text)
    assert words[0] == "expand" and words[-len(source) :] == list(map(str, source))
    assert run(*words, "--dry-run").stdout == text


def test_what_report_proposes_in_a_folder_of_several(tmp_path: Path) -> None:
    law, two = tmp_path / "law", tmp_path / "two"
    adapt = ("--layers", "last:1", "--variant", "adapt")
    run("expand", SHIPPED_MODEL, *adapt, "--name", "law", "-o", law)
    assert proposed(run("report", law, "--files-only").stdout) == ["train", str(law), "--data", "FILE"]
    run("expand", shake(law), *adapt, "--name", "music", "-o", two)
    untrained = proposed(run("report", two, "--name", "music", "--files-only").stdout)
    assert untrained == ["train", str(two), "--name", "music", "--data", "FILE"]
    trained = proposed(run("report", two, "--name", "law", "--files-only").stdout)
    assert trained == ["route-report", str(two), "--text", "FILE"], "it routes already"


def test_what_inspect_proposes_has_what_the_model_needs(tmp_path: Path) -> None:
    pine = save_speaking(tmp_path / "pine")
    trust = ["--trust-remote-code"]
    words = proposed(run("inspect", pine, *trust).stdout)
    assert words == ["plan", str(pine), "--layers", "last:1", *trust]
    assert proposed(run(*words).stdout)[0] == "expand", "and it is a plan"
    assert "--" not in " ".join(proposed(run("inspect", SHIPPED_MODEL).stdout)[4:]), "the control: nothing is added"
    expand(pine, Request("last:1"), tmp_path / "wide", run=RunOptions(trust_remote_code=True))
    assert proposed(run("inspect", tmp_path / "wide", *trust).stdout) == ["verify", str(tmp_path / "wide"), *trust]


def test_what_rank_layers_proposes_has_what_the_model_needs(tmp_path: Path) -> None:
    pine, text = save_speaking(tmp_path / "pine"), tmp_path / "text.txt"
    text.write_text("The bark of a pine is grey. " * 40)
    short = ["--data", text, "--steps", "1", "--batch-size", "1", "--sequence-length", "16", "--budget", "90%"]
    words = proposed(run("rank-layers", pine, *short, "--trust-remote-code").stdout)
    assert words[:2] == ["expand", str(pine)] and words[-1] == "--trust-remote-code"


@pytest.mark.parametrize("command", (["plan"], ["expand", "--dry-run"]))
def test_the_dtype_of_new_tensors_is_no_dtype_of_a_run(command: list[str]) -> None:
    name, *more = command
    asked = [SHIPPED_MODEL, "--layers", "last:1", "--dtype", "float16"]
    assert json.loads(run(name, *asked, *more, "--json").stdout)["request"]["dtype"] == "float16"
    assert proposed(run(name, *asked, *more).stdout) == ["expand", *map(str, asked)]
